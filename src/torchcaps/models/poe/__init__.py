"""Products of expert capsules (Hauser 2019); `docs/systems/poe.md` goes from the equations to the numbers."""

from torchcaps.models.poe.config import DecoderConfig, EnergyConfig, PoEConfig
from torchcaps.models.poe.model import PoE

__all__ = ["DecoderConfig", "EnergyConfig", "PoE", "PoEConfig"]
