"""Engines in other processes, without processes: tests stand between both ends."""
