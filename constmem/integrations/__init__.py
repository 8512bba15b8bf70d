"""Adapters to other libraries, one thin module each; nothing here is imported unless asked for."""
