//! Prints the guest driver's C header.

fn main() {
    print!("{}", farlane_abi::header::generate());
}
