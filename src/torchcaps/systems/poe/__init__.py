"""Products of expert capsules (Hauser 2019): metrics, figures and explorer view."""
