"""The learner for one table or one stream: closed form, constant in memory, calibrated."""
