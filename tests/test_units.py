"""Bytes as people write them."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monetlite.core.errors import BudgetError, MonetliteError
from monetlite.core.units import format_bytes, format_ms, parse_budget

DECIMAL = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("6GB", 6 * 10**9),
        ("6GiB", 6 * 2**30),
        ("6000MB", 6 * 10**9),
        ("6 gb", 6 * 10**9),
        (" 1.5GiB ", 3 * 2**29),
        (".5kB", 500),
        ("123456789", 123_456_789),
        ("7b", 7),
        ("6G", 6 * 10**9),
        ("900m", 900 * 10**6),
        ("1,5GB", 3 * 10**9 // 2),
        ("2TiB", 2**41),
        ("8.2GB", 8_200_000_000),
        (6_000_000_000, 6 * 10**9),
        (6e9, 6 * 10**9),
        ("9007199254740993", 2**53 + 1),
        ("1152921504606846976", 2**60),
    ],
)
def test_budgets(text, size_bytes):
    assert parse_budget(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "says"),
    [("6", "write 6GB, 6MB or 6B"), ("1,500MB", "without the comma"), ("12,500", "without the comma")],
)
def test_an_amount_that_means_something_else_is_asked_back(text, says):
    with pytest.raises(BudgetError, match=says):
        parse_budget(text, plain_peak_bytes=1000)


def test_percent_is_of_plain_trainings_peak_and_rounds_down():
    assert parse_budget("50%", plain_peak_bytes=1001) == 500
    assert parse_budget("12.5 %", plain_peak_bytes=8 * 10**9) == 10**9
    assert parse_budget("12,5%", plain_peak_bytes=8 * 10**9) == 10**9
    assert parse_budget("29%", plain_peak_bytes=100) == 29
    assert parse_budget("150%", plain_peak_bytes=1000) == 1500
    with pytest.raises(BudgetError, match="plain training's peak, which is not known"):
        parse_budget("50%")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GB",
        "-6GB",
        "0",
        "0GB",
        "0%",
        "0.4",
        "-1",
        "6XB",
        "6 G B",
        "6e9",
        "six",
        "nan",
        "inf",
        "6GB!",
        "٦GB",
        "6%%",
        "%",
        "1.2.3GB",
        "9" * 6000,
        "9" * 6000 + "GB",
        "9" * 6000 + "%",
        "0." + "9" * 6000 + "TB" + "x",
        "1152921504606846977",
        "2000PB",
        None,
        True,
        False,
        float("nan"),
        float("inf"),
        -5,
        [6],
        "6\nGB GB",
    ],
)
def test_what_is_not_a_budget(text):
    with pytest.raises(BudgetError, match="6GB") as raised:
        parse_budget(text, plain_peak_bytes=10**9)
    assert isinstance(raised.value, MonetliteError)


@given(st.integers(1, 2**60), st.sampled_from(["", "B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]))
def test_whole_numbers_are_exact(number, unit):
    factor = {**DECIMAL, "": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
    if not unit:
        assert parse_budget(number) == number
    if number * factor <= 2**60 and (unit or number >= 10**6):
        assert parse_budget(f"{number}{unit}") == number * factor
    else:
        with pytest.raises(BudgetError):
            parse_budget(f"{number}{unit}")


@given(st.integers(-(10**15), 10**15))
def test_written_sizes_are_short_and_right_to_three_digits(size_bytes):
    number, unit = format_bytes(size_bytes).split()
    assert "e" not in number
    assert abs(Decimal(number)) < 1000 or unit == "TB"
    assert abs(Decimal(number) * DECIMAL[unit] - size_bytes) <= abs(size_bytes) * Decimal("0.005")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (999_999_999, "1 GB"),
        (5_930_000_000, "5.93 GB"),
        (-20_500, "-20.5 kB"),
        (2_345 * 10**12, "2345 TB"),
    ],
)
def test_sizes_at_the_edges(size_bytes, text):
    assert format_bytes(size_bytes) == text


@given(st.floats(0, 10**7))
def test_written_latencies(latency_ms):
    number, unit = format_ms(latency_ms).split()
    if latency_ms >= 0.001:
        assert "e" not in number
    assert float(number) * {"ms": 1, "s": 1000}[unit] == pytest.approx(latency_ms, rel=0.0051)
