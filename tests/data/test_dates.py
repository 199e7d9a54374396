import datetime

import pytest

from attrimem_jax.data import dates


@pytest.mark.parametrize(
  ("text", "iso"),
  [
    ("1:56 pm on 8 May, 2023", "2023-05-08T13:56"),
    ("12:09 am on 13 September, 2023", "2023-09-13T00:09"),
    ("12:30 pm on 1 January, 2022", "2022-01-01T12:30"),
    ("11:59 PM on 29 February, 2024", "2024-02-29T23:59"),
    ("  9:05 am on 3 Oct 2023 ", "2023-10-03T09:05"),
  ],
)
def test_parse(text, iso):
  assert dates.parse(text) == iso


@pytest.mark.parametrize(
  "text",
  ["", "yesterday", "2023-05-08", "13:00 pm on 8 May, 2023", "0:10 am on 8 May, 2023", "1:56 pm on 8 Mai, 2023"],
)
def test_other_forms_are_refused_with_the_text(text):
  with pytest.raises(ValueError, match="is not a date like '1:56 pm on 8 May, 2023'"):
    dates.parse(text)


def test_a_day_that_does_not_exist_is_refused():
  with pytest.raises(ValueError, match="31 February, 2023"):
    dates.parse("1:56 pm on 31 February, 2023")


@pytest.mark.parametrize(
  ("given", "iso"),
  [
    ("", ""),
    ("2024-03-04", "2024-03-04"),
    ("20240304", "2024-03-04"),
    ("2024-03-04 18:30:59", "2024-03-04T18:30"),
    ("20240304T1830", "2024-03-04T18:30"),
    ("2024-03-04T18:30+02:00", "2024-03-04T18:30"),
    (datetime.date(2024, 3, 4), "2024-03-04"),
    (datetime.datetime(2024, 3, 4, 18, 30, 59), "2024-03-04T18:30"),
  ],
)
def test_iso(given, iso):
  assert dates.iso("it", given) == iso


@pytest.mark.parametrize(
  "given", [None, 3, "yesterday", "2024-02-30", " ", b"2024-03-04", "2024-03-04T25:00", "\ud800"]
)
def test_what_is_no_iso_date(given):
  with pytest.raises(ValueError, match=r"it has the date .*: write 2024-03-04 or"):
    dates.iso("it", given)
