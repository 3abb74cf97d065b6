"""CapsNet with dynamic routing (Sabour 2017): metrics, figures and explorer view."""
