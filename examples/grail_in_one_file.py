"""GRAIL in one file: the token weights of one response, to copy into any trainer. `grail_weights` needs torch alone.

    python examples/grail_in_one_file.py           three answers in colours, by the small model of packages/verl-cpu
    python examples/grail_in_one_file.py MODEL     by any causal language model: a folder, or a name on the hub

Source: arXiv 2606.04889 as its authors' code behaves (this package's preset `official`). The numbers in `grail_weights`
are the steps of docs/how_it_works.md; the model is in evaluation mode. The package gives the same weights, for batches
and shards.

Shapes: P prompt tokens, T response tokens, D embedding, V vocabulary.
"""

import re
import sys
from itertools import accumulate, pairwise
from pathlib import Path

import torch


def grail_weights(model, prompt, response, answer, content, advantage, temperature=1.0):
    """(T,) float32 weights of a response; its token advantages are `weights * advantage`. `prompt` (P,) and
    `response` (T,) are token ids, `answer` and `content` (T,) bool: the tokens of `\\boxed{42}` and of its 42."""
    predicting = slice(len(prompt) - 1, -1)  # the position that predicts each response token
    ids = torch.cat([prompt, response])[None]
    embeddings = model.get_input_embeddings()
    h = embeddings(ids).detach().requires_grad_()  # (1, P+T, D)
    # Not inputs_embeds: Gemma 3n, DeepSeek-V4 read the ids, too
    with embeddings.register_forward_hook(lambda *_: h):
        logits = model(input_ids=ids).logits
    log_probs = (logits[0, predicting].float() / temperature).log_softmax(-1)  # (T, V)
    loss = -log_probs.gather(-1, response[:, None])[answer].sum()  # 1.
    (gradient,) = torch.autograd.grad(loss, h)  # no parameter gets one
    scores = (gradient.float() * h.detach().float()).norm(dim=-1)[0, predicting]  # 2. (T,)
    log_scores = (scores.cpu().double() + 1e-8).log()
    z = (log_scores - log_scores.mean()) / (log_scores.var(unbiased=False) + 1e-8).sqrt()  # 3.
    weights = (1 + 0.5 * z).clamp(0.5, 5).float().to(scores.device)
    if advantage > 0:
        weights[:] = 1
    weights[answer.cumsum(0) > 0] = 1  # 4.
    weights[content] = 5
    return weights


_INSIDE = r"(?:\\.|[^{}\\])*"
for _ in range(4):  # braces in braces, so deep
    _INSIDE = rf"(?:\\.|[^{{}}\\]|\{{{_INSIDE}\}})*"
BOXED = rf"(?s)\\boxed\{{(?P<content>{_INSIDE})\}}"
HASHES = r"#### (?P<content>-?[0-9.,]+)"


def find_answer(tokens, pattern=BOXED, which=0):
    """`answer` and `content` of `grail_weights`, (T,) bool, for tokens as `convert_ids_to_tokens` gives them; None without
    an answer. `which` is 0 for the first answer, as published, and -1 for the last, which most rewards read."""
    spaces = str.maketrans("\u0120\u2581", "  ")  # of byte-level BPE and SentencePiece
    texts = [token.translate(spaces) for token in tokens]
    matches = list(re.finditer(pattern, "".join(texts)))
    if not matches:
        return None
    places = list(pairwise([0, *accumulate(map(len, texts))]))

    def covers(first, end):
        return torch.tensor([max(start, first) < min(stop, end) for start, stop in places])

    return covers(*matches[which].span()), covers(*matches[which].span("content"))


PROBLEM = "4-1+7+7-7"
ANSWERS = {
    "correct": (r"4-1=3;3+7=10;10+7=17;17-7=10;\boxed{10}", ""),
    "a slip in the second step": (r"4-1=3;3+7=11;11+7=18;18-7=11;\boxed{11}", "3+7=11;"),
    "a slip in the last step": (r"4-1=3;3+7=10;10+7=17;17-7=12;\boxed{12}", "17-7=12;"),
}
"""By what is wrong, the answer and its first wrong step."""
COLOURS = ((0.6, 39), (0.95, 117), (1.05, None), (1.5, 223), (2.5, 215), (4.9, 208), (9.0, 203))
"""The highest weight of each colour, and its number among a terminal's 256."""


def painted(text, weight):
    """The text on the colour of its weight."""
    colour = next(colour for highest, colour in COLOURS if weight <= highest)
    return text if colour is None else f"\x1b[30;48;5;{colour}m{text}\x1b[0m"


def load(name):
    """The model and the tokenizer of this name; without one those that come with this repository."""
    if name is None:
        # It need not be installed
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages/verl-cpu"))
        from verl_cpu.tiny.shipped import load_shipped

        return load_shipped()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)


def main():
    name = (sys.argv[1:] or [None])[0]
    try:
        model, tokenizer = load(name)
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(
            f"{str(error).strip().splitlines()[0]}; name a folder, or a model on the hub"
        ) from error
    model.eval()
    prompt = tokenizer(f"{PROBLEM}\n")["input_ids"]
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": PROBLEM}]
        options = {"add_generation_prompt": True, "return_dict": False, "enable_thinking": False}
        prompt = tokenizer.apply_chat_template(messages, **options)
    print(f"{PROBLEM}, read by {name or 'the model of packages/verl-cpu (0.65 M parameters)'}")
    for about, (text, wrong) in ANSWERS.items():
        response = tokenizer(text, add_special_tokens=False)["input_ids"]
        answer, content = find_answer(tokenizer.convert_ids_to_tokens(response))
        advantage = 0.5 if about == "correct" else -0.5
        ids = torch.tensor(prompt), torch.tensor(response)
        weights = grail_weights(model, *ids, answer, content, advantage).tolist()
        texts = [tokenizer.decode([token]) for token in response]
        print(f"\n{about} (advantage {advantage})\n" + "".join(map(painted, texts, weights)))
        if wrong:
            first = text.index(wrong)
            starts = [0, *accumulate(map(len, texts))]
            of_step = [
                w
                for w, start in zip(weights, starts, strict=False)
                if first <= start < first + len(wrong)
            ]
            reasoning = weights[: int(answer.int().argmax())]
            print(
                f"{' ' * first}{'^' * len(wrong)} the wrong step: mean weight {sum(of_step) / len(of_step):.2f}, ",
                end="",
            )
            print(f"all reasoning {sum(reasoning) / len(reasoning):.2f}")
    print(
        "\nweight "
        + " ".join(painted(f" {weight:g} ", weight) for weight in (0.5, 0.8, 1, 1.3, 2, 3, 5))
    )
    print(
        "A weight says how much the answer hangs on a token, which is not whether the token is wrong."
    )


if __name__ == "__main__":
    main()
