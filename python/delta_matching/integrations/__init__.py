"""delta_matching inside other libraries. Nothing here is imported by ``import delta_matching``."""
