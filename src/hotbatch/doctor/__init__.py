"""`hotbatch doctor`: watches a server's /metrics and says what keeps it from doing more.

`scrape` reads the text of one scrape, whichever server wrote it; `window` is what happened
between scrapes; `judge` turns that into a verdict: the largest loss, its evidence, the lever, the
expected gain. It knows the server by its /metrics alone, so it can be run from anywhere.
"""

from hotbatch.doctor.scrape import Scrape, read_scrape
from hotbatch.doctor.verdict import Finding, Verdict, judge
from hotbatch.doctor.window import Window, make_window

__all__ = ["Finding", "Scrape", "Verdict", "Window", "judge", "make_window", "read_scrape"]
