//! `farlane-borrow`.

fn main() {}
