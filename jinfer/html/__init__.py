"""Markup: the stylesheet, script and elements that all views in HTML and SVG share."""
