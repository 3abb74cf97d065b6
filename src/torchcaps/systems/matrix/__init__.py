"""Matrix capsules with EM routing (Hinton 2018): metrics, figures and explorer view."""
