"""The page of a report: one HTML file with its pictures, style and script inside, which loads nothing from anywhere.

In: a `ReportData`. Out: HTML text. Each part of the page has a module here, which draws it as SVG. Pictures are as wide as the
window: positions along the width are percentages, so that text keeps its size on a phone. Without the script, hints are the
browser's.
"""

from autohete_fx.report.page.document import page_of, sentences_of

__all__ = ["page_of", "sentences_of"]
