"""Token advantages in a trainer of one's own whose model is in workers."""

from grail_advantage.method import build
from grail_advantage.model.hugging_face import HuggingFaceModel, read_columns, run_rows
from grail_advantage.weigh import weigh


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


class MyHost:
    """The workers have the model. Each gets a share of the rows, which may be empty, and every one is called."""

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
