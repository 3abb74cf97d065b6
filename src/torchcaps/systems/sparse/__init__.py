"""Sparse unsupervised capsules (Rawlinson 2018): metrics, figures and explorer view."""
