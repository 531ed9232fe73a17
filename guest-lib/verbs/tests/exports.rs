//! The built library exports what programs import, under the versions they name, and no more.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test")]

use std::ffi::{CString, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const MAP: &str = include_str!("../libibverbs.map");

/// Names that only rdma-core's own libraries use: they must be there for any private version.
const PRIVATE: &[&str] = &[
    "ibv_query_gid_type",
    "verbs_register_driver_34",
    "verbs_set_ops",
    "verbs_init_cq",
    "verbs_allow_disassociate_destroy",
    "_verbs_init_and_alloc_context",
    "__ioctl_final_num_attrs",
    "__verbs_log",
    "execute_ioctl",
    "ibv_cmd_create_qp_ex2",
    "ibv_cmd_create_cq_ex2",
    "ibv_cmd_reg_dmabuf_mr",
    "ibv_wr_opcode_str",
];

/// The library that cargo built for this test.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let deps = test.parent().unwrap();
    let name = "libfarlane_verbs.so";
    [deps.join(name), deps.parent().unwrap().join(name)]
        .into_iter()
        .find(|path| path.exists())
        .expect("the library is built before its tests")
}

/// Every (version, symbols) of the map.
fn versions() -> Vec<(&'static str, Vec<&'static str>)> {
    let mut found = Vec::new();
    let mut text = MAP;
    while let Some(start) = text.find("\nIBVERBS_") {
        text = &text[start + 1..];
        let name = text.split([' ', '\n']).next().unwrap();
        let end = text.find('}').unwrap();
        let body = &text[text.find('{').unwrap() + 1..end];
        let globals = body.split("/*").next().unwrap();
        let symbols = globals
            .split_whitespace()
            .filter_map(|word| word.strip_suffix(';'))
            .collect();
        found.push((name, symbols));
        text = &text[end..];
    }
    found
}

/// The library, loaded with every symbol bound at once.
struct Loaded(*mut c_void);

impl Loaded {
    fn new(path: &Path) -> Self {
        let path = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: the library's constructors are those of the Rust runtime alone.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null());
        Self(handle)
    }

    /// Whether a program that imports `name` of `version` is served.
    fn has(&self, name: &str, version: &str) -> bool {
        let (name, version) = (CString::new(name).unwrap(), CString::new(version).unwrap());
        // SAFETY: the handle is that of a loaded library, the strings end with NUL.
        !unsafe { libc::dlvsym(self.0, name.as_ptr(), version.as_ptr()) }.is_null()
    }
}

#[test]
fn each_symbol_is_there_under_its_version() {
    let library = Loaded::new(&library());
    let versions = versions();
    assert_eq!(versions.len(), 17);
    let mut public = 0;
    for (version, symbols) in &versions {
        for symbol in symbols {
            assert!(library.has(symbol, version), "{symbol}@{version}");
            public += 1;
        }
    }
    // The 75 that rdma-core 56 has by default, and ibv_register_driver.
    assert_eq!(public, 76);
    assert!(!library.has("ibv_open_device", "IBVERBS_1.0"));
}

/// Runs the C compiler.
fn compile(arguments: &[&str], folder: &Path) {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let done = Command::new(compiler)
        .args(arguments)
        .current_dir(folder)
        .output()
        .unwrap();
    assert!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
}

/// A program is linked to a library that has the private symbols under the version of one
/// release, as rdma-core's own has, and then run on ours.
#[test]
fn a_private_symbol_serves_every_release() {
    let temporary = tempfile::tempdir().unwrap();
    let functions = PRIVATE
        .iter()
        .filter(|name| **name != "verbs_allow_disassociate_destroy");
    let (mut library_source, mut program_source) = (String::new(), String::new());
    for name in functions {
        library_source += &format!("int {name}(void) {{ return 1; }}\n");
        program_source += &format!("extern int {name}(void);\n");
    }
    library_source += "char verbs_allow_disassociate_destroy;\n";
    program_source += "extern char verbs_allow_disassociate_destroy;\nvoid *all[] = {\n";
    for name in PRIVATE {
        program_source += &format!("\t(void *)&{name},\n");
    }
    program_source += "};\nint main(void) { return all[0] == 0; }\n";

    for release in ["34", "57", "59", "64", "65"] {
        let folder = temporary.path().join(release);
        let ours = folder.join("ours");
        fs::create_dir_all(&ours).unwrap();
        std::os::unix::fs::symlink(library(), ours.join("libibverbs.so.1")).unwrap();
        fs::write(folder.join("lib.c"), &library_source).unwrap();
        fs::write(folder.join("program.c"), &program_source).unwrap();
        let symbols: String = PRIVATE.iter().map(|name| format!("{name}; ")).collect();
        let map = format!("IBVERBS_PRIVATE_{release} {{ global: {symbols} local: *; }};\n");
        fs::write(folder.join("map"), map).unwrap();
        compile(
            &[
                "-w",
                "-fno-builtin",
                "-shared",
                "-fPIC",
                "-Wl,-soname,libibverbs.so.1",
                "-Wl,--version-script=map",
                "-o",
                "libstand-in.so",
                "lib.c",
            ],
            &folder,
        );
        compile(
            &[
                "-w",
                "-fPIC",
                "-pie",
                "-o",
                "program",
                "program.c",
                "-L.",
                "-lstand-in",
            ],
            &folder,
        );
        let run = Command::new(folder.join("program"))
            .env("LD_LIBRARY_PATH", &ours)
            .env("LD_BIND_NOW", "1")
            .output()
            .unwrap();
        assert!(
            run.status.success(),
            "release {release}: {}",
            String::from_utf8_lossy(&run.stderr)
        );
    }
}

#[test]
fn nothing_else_is_exported() {
    let nm = Command::new("nm")
        .args(["--dynamic", "--defined-only", "--format=posix"])
        .arg(library())
        .output()
        .expect("nm comes with the linker");
    let text = String::from_utf8(nm.stdout).unwrap();
    let names: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split(['@', ' ']).next())
        .collect();
    assert!(names.len() > 140, "{}", names.len());
    let known = |name: &str| {
        [
            "ibv_",
            "_ibv_",
            "verbs_",
            "_verbs_",
            "__verbs_log",
            "IBVERBS_",
        ]
        .iter()
        .any(|prefix| name.starts_with(prefix))
            || ["mult_to_ibv_rate", "mbps_to_ibv_rate", "execute_ioctl"].contains(&name)
            || name == "__ioctl_final_num_attrs"
    };
    let stray: Vec<&&str> = names.iter().filter(|name| !known(name)).collect();
    assert!(stray.is_empty(), "{stray:?}");
}

#[test]
fn its_name_is_that_of_the_library_it_stands_for() {
    let readelf = Command::new("readelf")
        .arg("--dynamic")
        .arg(library())
        .output()
        .expect("readelf comes with the linker");
    let text = String::from_utf8(readelf.stdout).unwrap();
    assert!(text.contains("Library soname: [libibverbs.so.1]"), "{text}");
}
