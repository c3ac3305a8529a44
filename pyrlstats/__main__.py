"""``python -m pyrlstats``."""

from pyrlstats.cli import main

main()
