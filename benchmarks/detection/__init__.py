"""How early growth is found, at what rate of false alarms, by whom: see docs/monitor.md."""
