"""Small tools that know nothing of capsules: atomic files, progress, process groups, random numbers by counter."""
