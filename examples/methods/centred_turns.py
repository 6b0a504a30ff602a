"""By turns: each turn's return less the mean return of the group's first turns."""

from grail_advantage import register
from grail_advantage.methods.sessions import TurnMethod


@register("centred_turns")
class CentredTurns(TurnMethod):
    def advantages(self, sessions):
        returns = [session.returns(1.0, outcome=self.outcome) for session in sessions]
        mean = sum(of[0] for of in returns) / len(returns)
        return [of - mean for of in returns]
