"""Watching a run: detectors, alerts and the folder a run leaves behind."""
