"""A schedule as one interactive HTML page that needs nothing but a browser.

`facts` has what the page says, `columns` what its script draws, `document` puts the files in `page/` together.
"""

from monetlite.reporting.html.report_page import write_report

__all__ = ["write_report"]
