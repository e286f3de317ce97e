"""Numbers with units, short enough for a table cell: three significant digits, one unit."""

__all__ = ["format_bytes", "format_count", "format_flops", "format_seconds"]


def format_bytes(num_bytes: float) -> str:
    """Binary units: ``0 B``, ``1.50 KiB``, ``20.0 GiB``; what ``memory_budget`` reads back."""
    return _scaled(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_count(count: float) -> str:
    """Decimal suffixes: ``950``, ``12.3 K``, ``1.02 B``."""
    return _scaled(count, 1000, ("", "K", "M", "B", "T")).rstrip()


def format_flops(flops_per_s: float) -> str:
    """Floating-point operations a second: ``45.1 GFLOP/s``, ``312 TFLOP/s``."""
    return _scaled(float(flops_per_s), 1000, ("FLOP/s", "KFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"))


def format_seconds(seconds: float) -> str:
    """``0 s``, ``35.2 us``, ``1.20 ms``, ``3.45 s``, ``2 min 05 s``, ``1 h 02 min``."""
    if abs(seconds) >= 59.95:
        minutes, rest = divmod(round(abs(seconds)), 60)
        hours, minutes = divmod(minutes, 60)
        text = f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
        return f"-{text}" if seconds < 0 else text
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(seconds) * scale >= 0.9995:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{_three_digits(seconds * 1e9)} ns" if seconds else "0 s"


def _scaled(number: float, step: int, units: tuple[str, ...]) -> str:
    """The number in the largest unit in which its rounded value is at least 1."""
    if float(number).is_integer() and abs(number) < step:
        return f"{int(number)} {units[0]}"
    exponent = 0
    while exponent < len(units) - 1 and abs(number) >= 999.5:
        number, exponent = number / step, exponent + 1
    return f"{_three_digits(number)} {units[exponent]}"


def _three_digits(number: float) -> str:
    size = abs(number)
    decimals = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{number:.{decimals}f}"
