"""Words for figures that several parts of the page say."""


def off(predicted: float, measured: float) -> str:
    """How far a prediction is from its measurement, which is not 0: ``3.2% too high``, or ``right`` where less than a tenth of a
    percent is missing."""
    error = predicted / measured - 1
    if abs(error) < 0.0005:
        return "right"
    return f"{abs(error):.1%} too {'high' if error > 0 else 'low'}"
