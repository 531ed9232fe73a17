//! Host-allocated buffers and transfers with callbacks: the examples of libfarlane, in C, Rust and
//! Python, against each other; and what becomes of a buffer's memory.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest_root::GuestFile;
use farlane_kit::packages;
use farlane_kit::process::check_output;
use farlane_kit::report::Report;
use farlane_kit::wire::Wire;
use farlane_kit::workspace::Workspace;

use crate::place::{Host, Over, Place};
use crate::run::Run;
use crate::tools::{Program, TOOL_TIMEOUT};

/// Lengths of the buffers: a page, a mebibyte, and 8 MiB of which neither end is a whole word.
const LENGTHS: &[u64] = &[4096, 1 << 20, (8 << 20) + 13, (8 << 20) - 4093];

/// Lengths of the buffers where one end is in Python, which takes long to make a pattern.
const LENGTHS_IN_PYTHON: &[u64] = &[4096, (1 << 20) - 4093];

/// How long compiling the example may take.
const COMPILE_TIMEOUT: Duration = Duration::from_secs(120);

/// Where the programs lie in a guest.
const GUEST_FOLDER: &str = "/usr/lib/farlane/examples";

/// The window of a guest, and the share of host memory of a process of this machine.
const GUEST_LIMIT: u64 = 256 << 20;
const HOST_LIMIT: u64 = 1 << 30;

/// The programs of this scenario in one kind of place.
struct Programs {
    in_c: String,
    in_rust: String,
    in_python: String,
    buffers: String,
}

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    packages::ensure(&["python3"])?;
    let farlane = run.context.farlane()?;
    let (files, on_host) = build(run)?;
    {
        let wire = Wire::new()?;
        let mut pair = farlane.boot_pair_as(run, &wire, None, |config| {
            config.files(files.clone()).python()
        })?;
        let programs = Programs::at(Path::new(GUEST_FOLDER));
        transfers("two VMs", &programs, &pair.a, &pair.b, report)?;
        memory("VM", &programs, &pair.a, GUEST_LIMIT, report)?;
        ensure!(pair.backend.is_running()?, "The daemon has ended");
        pair.backend.stop()?;
    }
    let socket = run.path("host");
    let backend = farlane.daemon(run, &[], Some(&socket))?;
    let host = Host::new(farlane.programs(), &socket, run.logs());
    transfers("host", &on_host, &host, &host, report)?;
    memory("host", &on_host, &host, HOST_LIMIT, report)?;
    backend.stop()
}

impl Programs {
    fn at(folder: &Path) -> Self {
        let path = |name: &str| folder.join(name).display().to_string();
        Self {
            in_c: path("transfer-c"),
            in_rust: path("transfer"),
            in_python: format!("python3 {}", path("transfer.py")),
            buffers: path("buffers"),
        }
    }
}

/// Builds the programs: for a guest as files, and in a folder of this machine.
fn build(run: &Run<'_>) -> Result<(Vec<GuestFile>, Programs)> {
    let workspace = run.context.workspace();
    let in_c = run.path("transfer-c");
    compile(workspace, &in_c)?;
    let built = [
        ("transfer-c", in_c),
        ("transfer", workspace.build_example("farlane", "transfer")?),
        (
            "buffers",
            workspace.build_example("farlane-rdma-client", "buffers")?,
        ),
        (
            "transfer.py",
            workspace
                .root()
                .join("guest-lib/farlane/examples/transfer.py"),
        ),
    ];
    let files = built.iter().map(|(name, path)| {
        let inside = format!("{GUEST_FOLDER}/{name}");
        GuestFile::new(path, inside.trim_start_matches('/'))
    });
    let path = |number: usize| -> String {
        let (_, path): &(&str, PathBuf) = &built[number];
        path.display().to_string()
    };
    let programs = Programs {
        in_c: path(0),
        in_rust: path(1),
        buffers: path(2),
        in_python: format!("python3 {}", path(3)),
    };
    Ok((files.collect(), programs))
}

/// Compiles the example in C as its first lines say, with all warnings as errors.
fn compile(workspace: &Workspace, program: &Path) -> Result<()> {
    let source = workspace.root().join("guest-lib/farlane");
    let mut command = Command::new("cc");
    command.args(["-O2", "-Wall", "-Wextra", "-Werror", "-I"]);
    command
        .arg(source.join("include"))
        .arg(source.join("examples/transfer.c"))
        .arg("-L")
        .arg(workspace.programs())
        .arg("-lfarlane")
        .arg("-o")
        .arg(program);
    check_output("cc", command, COMPILE_TIMEOUT).context("Cannot compile transfer.c")?;
    Ok(())
}

/// Each example serves another one, at all lengths; those in C and Rust serve each other.
fn transfers(
    name: &str,
    programs: &Programs,
    server: &dyn Place,
    client: &dyn Place,
    report: &mut Report,
) -> Result<()> {
    let Programs {
        in_c: c,
        in_rust: rust,
        in_python: python,
        ..
    } = programs;
    for (languages, serving, asking, lengths) in [
        ("C serves Rust", c, rust, LENGTHS),
        ("Rust serves C", rust, c, LENGTHS),
        ("Python serves C", python, c, LENGTHS_IN_PYTHON),
        ("Rust serves Python", rust, python, LENGTHS_IN_PYTHON),
    ] {
        for length in lengths {
            let what = format!("transfer of {length} bytes, {languages}");
            let talk = Program {
                name: &what,
                serve: &|port| Over::Farlane.command(&format!("{serving} serve {port} {length}")),
                ask: &|address, port| {
                    Over::Farlane.command(&format!("{asking} {address} {port} {length}"))
                },
            }
            .run(server, client)?;
            for (side, text) in [("server", &talk.served), ("client", &talk.asked)] {
                ensure!(
                    text.contains(&format!("{side}: {length} bytes right"))
                        && text.contains("placement Host"),
                    "The {side} of a {what} said:\n{text}"
                );
            }
            for way in ["polling", "callback"] {
                let figure = line_after(&talk.asked, &format!("{way}: "))?;
                report.add(name, format!("{what}, {way}"), figure);
            }
        }
    }
    Ok(())
}

/// What becomes of the memory of buffers where there are `limit` bytes for them.
fn memory(
    name: &str,
    programs: &Programs,
    place: &dyn Place,
    limit: u64,
    report: &mut Report,
) -> Result<()> {
    let buffers = |arguments: &str| -> Result<String> {
        let line = Over::Farlane.command(&format!("{} {arguments}", programs.buffers));
        let output = place.spawn(&line)?.wait(TOOL_TIMEOUT)?;
        output.check(format_args!("`{line}`"))?;
        Ok(output.all())
    };
    // Several times what there is, in pieces, one at a time: it must come back. The half of it,
    // written to by a process that ends without freeing; then more than the other half by another
    // process: no room but for what came back.
    let (piece, large) = (limit / 4, limit / 16);
    for (arguments, wanted) in [
        (format!("cycle 16 {piece}"), "cycled "),
        (format!("fill 10 {large}"), "filled "),
        (format!("clean 16 {large}"), "clean: "),
        (format!("beyond {}", limit + 4096), "beyond: "),
        ("register 1000003".to_owned(), "registered: "),
    ] {
        let said = buffers(&arguments)?;
        report.add(
            name,
            format!("buffers {arguments}"),
            line_after(&said, wanted)?,
        );
    }
    Ok(())
}

/// The rest of the line that begins with `prefix`.
fn line_after<'t>(text: &'t str, prefix: &str) -> Result<&'t str> {
    text.lines()
        .find_map(|line| line.strip_prefix(prefix))
        .with_context(|| format!("No line begins with {prefix:?} in:\n{text}"))
}
