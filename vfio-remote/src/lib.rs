//! Device Lending.
