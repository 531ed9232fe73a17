//! `farlane-lend`.

fn main() {}
