//! Runs a program on Farlane's libraries.

fn main() {}
