"""Functions of the user for `groups`: an answer at once, and a reward of it."""


async def generate(sample, context):
    sample.token_ids = [1, 2, 3, 4, sample.index]
    sample.loss_mask = [0, 0, 0, 1, 1]
    sample.logprobs = [0.0, 0.0, 0.0, -0.5, -0.25]
    sample.versions = [(1, 3, 5)]
    sample.response = "ok"
    sample.status = "completed"


async def reward(sample):
    return float(sample.index % 2)
