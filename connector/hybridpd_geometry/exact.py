"""Integer arithmetic that refuses to round silently."""

from hybridpd_geometry.errors import GeometryError


def divide_exact(numerator: int, denominator: int, field: str) -> int:
    """`numerator / denominator`, which must be a whole number; otherwise GeometryError."""
    if denominator <= 0:
        raise GeometryError(field, "a positive divisor", denominator)
    quotient, rest = divmod(numerator, denominator)
    if rest:
        raise GeometryError(field, f"a multiple of {denominator}", numerator)
    return quotient


def ceil_div(numerator: int, denominator: int) -> int:
    """The smallest whole number that is at least `numerator / denominator`."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return ceil_div(value, multiple) * multiple
