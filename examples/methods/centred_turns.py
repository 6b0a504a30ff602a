"""By turns: each turn's return less the mean return of the group's first turns."""

from grail_advantage import register
from grail_advantage.methods.sessions import TurnMethod


@register("centred_turns")
class CentredTurns(TurnMethod):
    def advantages(self, sessions):
        returns = [session.returns(1.0, outcome=self.outcome) for session in sessions]
        mean = sum(of_turns[0] for of_turns in returns) / len(returns)
        return [of_turns - mean for of_turns in returns]
