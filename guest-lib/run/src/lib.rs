//! `farlane-run`: runs a program on Farlane's libraries.
//!
//! * [`options`]: the command line; [`library`]: where the libraries are.

pub mod library;
pub mod options;
