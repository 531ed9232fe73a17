//! Prints the guest driver's C header; with the argument `verbs` the one of the verbs.

use farlane_abi::header;
use std::env;

fn main() {
    let text = match env::args().nth(1).as_deref() {
        Some("verbs") => header::generate_verbs(),
        _ => header::generate(),
    };
    print!("{text}");
}
