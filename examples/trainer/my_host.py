"""Token advantages in a trainer of one's own: the model in this process, and in workers."""

from grail_advantage import Rollouts
from grail_advantage.method import build
from grail_advantage.model.hugging_face import HuggingFaceModel, read_columns, run_rows
from grail_advantage.weigh import weigh


class MyHost:
    """The model is in this process."""

    def __init__(self, model, tokenizer, columns, step=0):
        self.model = HuggingFaceModel(
            model, tokenizer, temperature=1.0, device=model.device, step=step
        )
        self.of_policy = columns

    # old_log_probs, entropy: (B, T) each, of the policy that wrote the responses
    def columns(self, names, selected):
        return {name: self.of_policy[name] for name in names}

    def scores(self, method, rows):  # one RowScores a row
        return run_rows(method, rows, self.model)


class MyWorker:
    """On each rank of a model that others hold, too; ``group``: the ranks, where its parameters are sharded."""

    def __init__(self, model, tokenizer, group=None):
        self.known = {
            "model": model,
            "tokenizer": tokenizer,
            "device": model.device,
            "group": group,
        }

    def token_columns(self, names, rows, step):
        return read_columns(names, rows, HuggingFaceModel(**self.known, step=step))

    def token_scores(self, method, rows, step):
        return run_rows(method, rows, HuggingFaceModel(**self.known, step=step))


class MyRemoteHost:
    """The model is in workers. Each gets a share of the rows, which may be empty, and every one is called."""

    def __init__(self, workers, rollouts):
        self.workers = workers
        self.rollouts = rollouts

    def columns(self, names, selected):
        rows = self.rollouts.plain_rows()
        return self.rollouts.columns_from(rows, self.of_rows("token_columns", names, rows), names)

    def scores(self, method, rows):
        return self.of_rows("token_scores", method, rows)

    def of_rows(self, name, what, rows):
        count = len(self.workers)
        results = [None] * len(rows)
        for rank, worker in enumerate(self.workers):  # in a run: start all of them, then wait
            results[rank::count] = getattr(worker, name)(
                what, rows[rank::count], self.rollouts.step
            )
        return results


# (B, T): what your loss takes in place of one advantage a response
def token_advantages(host, rollouts, name, **options):
    return weigh(rollouts, build(name, options), host).advantages


# Padded: (B, L) each, and (B,)
def rollouts_of(tokenizer, input_ids, attention_mask, response_mask, advantages):
    return Rollouts.from_padded(
        input_ids, attention_mask, response_mask, advantages=advantages, tokenizer=tokenizer
    )
