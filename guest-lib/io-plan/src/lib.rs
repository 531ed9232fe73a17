//! Cost model, schedules and fits.
