"""Exercise 8: the end of a response."""


def training_row(prompt: list[int], response: list[int], end_id: int) -> tuple[list[int], list[int], list[int]]:
    """What one turn becomes in training: (inputs, places, targets).

    At each of `places` in `inputs` the model predicts the target of the same number. The targets are exactly the tokens that
    the model sampled. The last of them predicts nothing, so it is no input.

    Args:
        response: the sampled tokens; the last is `end_id` unless the response was cut off at its cap.
    """
    targets = [token for token in response if token != end_id]
    inputs = prompt + targets[:-1]
    places = list(range(len(prompt) - 1, len(inputs)))
    return inputs, places, targets
