"""The explorer: a page that shows the inside of trained capsule networks, served on one's own machine.

It knows no model class. What it shows of a run comes from the `ExplorerView` of the run's system
(`torchcaps.systems.system_of`).
"""
