//! Links the library as `libibverbs.so.1` with the symbol versions of `libibverbs.map`.

#[path = "../version_script.rs"]
mod version_script;

use std::path::Path;
use std::{env, error::Error};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=../version_script.rs");
    let map = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("libibverbs.map");
    let out = env::var("OUT_DIR")?;
    let out = Path::new(&out);
    version_script::link(out, "libibverbs.so.1", &map)?;
    version_script::name_library(out, "libibverbs.so.1", "libfarlane_verbs.so")
}
