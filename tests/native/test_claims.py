"""docs/kernels-claims.md: every test it names exists, every figure is within its bound."""

from tests.support.claims import check


def test_every_row_names_a_test_that_exists_or_a_figure_within_its_bound() -> None:
    check("kernels-claims.md", "tests", least=19)
