"""Inferflow's dialect: one route that answers a text."""
