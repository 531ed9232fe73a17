//! Managers that talk to each other over a wire that the tests have.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod hostile;
mod limits;
mod model;
mod scenarios;
mod sending;
mod services;
mod wire;
