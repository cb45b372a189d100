"""The HTML page: `report_page` has its words and writes it, `page_data` has the figures that its script draws."""

from monetlite.reporting.html.report_page import write_report

__all__ = ["write_report"]
