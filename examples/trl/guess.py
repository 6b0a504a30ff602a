"""A game for TRL's ``environment_factory``: guess the number that a row of the data has; a reward for each guess."""


class Guess:
    def reset(self, number: int, **row) -> None:
        self.number = number
        self.distance = 50
        self.tool_rewards = []

    def guess(self, value: int) -> str:
        """
        Guess the number, from 1 to 99.

        Args:
            value: the guess.

        Returns:
            Whether the number is higher or lower.
        """
        distance = abs(self.number - value)
        self.tool_rewards.append((self.distance - distance) / 50)
        self.distance = distance
        if distance == 0:
            return "found"
        return "higher" if value < self.number else "lower"

    def get_reward(self) -> float:
        return float(self.distance == 0)
