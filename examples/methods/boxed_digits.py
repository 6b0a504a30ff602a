"""A saliency method names its target alone, here the last token in the box."""

from typing import Literal

from grail_advantage import register
from grail_advantage.methods.saliency import Saliency


@register("boxed_digits")
class BoxedDigits(Saliency):
    statistics: Literal["response", "reasoning"] = "reasoning"
    alignment: Literal["predictor", "token"] = "token"

    def targets(self, row):
        answer = row.answer
        end = answer.content_end if answer.content_end > answer.content_start else answer.end
        return end - 1, end
