//! Programs with the library preloaded.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// What cargo built for this test.
fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let deps = test.parent().unwrap();
    [deps.join(name), deps.parent().unwrap().join(name)]
        .into_iter()
        .find(|path| path.exists())
        .unwrap()
}

fn preloaded(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    command.env("LD_PRELOAD", built("libfarlane_io.so"));
    for variable in ["FARLANE_IO", "FARLANE_IO_TRACE", "FARLANE_IO_STATS"] {
        command.env_remove(variable);
    }
    command
}

fn file(length: usize) -> (tempfile::TempDir, PathBuf, Vec<u8>) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("file");
    let mut state = 88_172_645_463_325_252_u64;
    let words = (0..length.div_ceil(8)).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_ne_bytes()
    });
    let content: Vec<u8> = words.take(length).collect();
    std::fs::write(&path, &content).unwrap();
    (folder, path, content)
}

fn told(output: &Output) -> String {
    format!(
        "{}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// Bytes through the cache, read ahead and by P2P, and calls.
fn story(name: &str, mode: &str) -> [u64; 4] {
    let (_folder, path, _) = file(2 << 20);
    let mut command = preloaded(built("examples/io_child"));
    let output = command
        .arg(name)
        .arg(&path)
        .env("FARLANE_IO", mode)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", told(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let numbers: Vec<u64> = text
        .split_whitespace()
        .map(|word| word.parse().unwrap())
        .collect();
    numbers.try_into().unwrap()
}

#[test]
fn every_call_moves_the_right_bytes_whatever_the_way() {
    let [cache, ahead, p2p, requests] = story("calls", "p2p");
    assert!(
        p2p > 50_000 && cache > 0 && ahead == 0,
        "{cache} {ahead} {p2p}"
    );
    assert_eq!(requests, 13);
    let [cache, ahead, p2p, _] = story("calls", "cache");
    assert!(
        cache > 800_000 && ahead == 0 && p2p == 0,
        "{cache} {ahead} {p2p}"
    );
    let [_, _, p2p, _] = story("calls", "auto");
    assert!(p2p > 0, "{p2p}");
    assert_eq!(story("calls", "off"), [0; 4]);
}

#[test]
fn numbers_that_a_program_does_not_know_are_closed_with_its_files_and_not_before() {
    let [_, _, p2p, _] = story("closes", "p2p");
    assert_eq!(p2p, 5 << 20);
}

/// Runs a story that tells nothing at its end.
fn locked(name: &str) {
    let (_folder, path, _) = file(2 << 20);
    let mut command = preloaded(built("examples/io_child"));
    command.args([name.as_ref(), path.as_os_str()]);
    let output = command.env("FARLANE_IO", "p2p").output().unwrap();
    assert!(output.status.success(), "{}", told(&output));
}

#[test]
fn a_lock_of_a_file_that_was_read_by_p2p_stays_over_execve() {
    locked("read_lock_exec");
}

#[test]
fn a_lock_of_a_file_that_is_read_while_it_is_locked_stays_over_execve() {
    locked("lock_read_exec");
}

#[test]
fn a_file_goes_the_plain_way_while_the_process_has_posix_locks_of_it() {
    locked("locks");
}

#[test]
fn a_child_has_no_locks_of_its_parents() {
    locked("locks_children");
}

#[test]
fn handlers_of_forks_lock_and_close_files() {
    locked("locks_forks");
}

/// Runs a story that may hang with signals blocked, with more libraries loaded before it.
fn ended(story: &str, others: &[&Path]) {
    let (_folder, path, _) = file(2 << 20);
    let mut command = preloaded("timeout");
    let library = command.get_envs().find(|(name, _)| *name == "LD_PRELOAD");
    let mut all = library.and_then(|(_, value)| value).unwrap().to_owned();
    for other in others {
        all.push(":");
        all.push(other);
    }
    command.args(["-s", "KILL", "60"]);
    command.args([built("examples/io_child"), story.into(), path]);
    let output = command.env("LD_PRELOAD", all).env("FARLANE_IO", "p2p");
    let output = output.output().unwrap();
    assert!(output.status.success(), "{}", told(&output));
}

#[test]
fn handlers_of_forks_unmap_and_map_device_memory() {
    ended("forks_unmap", &[]);
}

#[test]
fn an_allocator_unmaps_memory_while_the_library_changes_its_tables() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let allocator = compiled(folder.path(), "unmapping_malloc.c", "libunmapping.so");
    ended("allocators_unmap", &[&allocator]);
}

#[test]
fn a_handler_of_a_fork_forks_once_more() {
    locked("forks_in_forks");
}

#[test]
fn who_takes_a_lock_while_others_read_has_no_descriptor_of_the_librarys() {
    locked("locks_threads");
}

#[test]
fn a_lock_that_is_waited_for_comes_to_a_file_without_a_descriptor_of_the_librarys() {
    locked("locks_waits");
}

#[test]
fn a_thread_that_waits_for_a_lock_can_be_cancelled() {
    locked("locks_cancelled");
}

#[test]
fn signal_handlers_lock_files() {
    locked("locks_handlers");
}

#[test]
fn a_number_that_is_replaced_takes_no_lock_of_another_thread_with_it() {
    locked("locks_replaced");
}

#[test]
fn the_library_stands_before_every_function_that_takes_posix_locks() {
    locked("locks_names");
}

#[test]
fn parents_and_children_both_read_on() {
    let [_, _, p2p, _] = story("forks", "p2p");
    assert!(p2p > 0);
}

#[test]
fn signal_handlers_read_too() {
    let [_, _, p2p, _] = story("signals", "p2p");
    assert!(p2p >= 1 << 20);
}

#[test]
fn a_program_that_closes_and_replaces_unknown_numbers_does_no_harm() {
    let (folder, path, _) = file(2 << 20);
    let trace = folder.path().join("trace");
    let mut command = preloaded(built("examples/io_child"));
    command
        .args(["guards".as_ref(), path.as_os_str()])
        .env("FARLANE_IO", "p2p")
        .env("FARLANE_IO_STATS", "1")
        .env("FARLANE_IO_TRACE", &trace);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", told(&output));
    // All of it by P2P, and told to the end.
    assert_eq!(output.stdout, b"0 0 8388608 8\n");
    let said = String::from_utf8(output.stderr).unwrap();
    let line = r#"{"cache":0,"read_ahead":0,"p2p":8388608,"requests":8}"#;
    assert!(said.contains(line), "{said}");
    let decisions = std::fs::read_to_string(trace).unwrap();
    assert_eq!(decisions.lines().count(), 8);
}

#[test]
fn lists_that_are_not_mapped_are_refused_as_the_kernel_does() {
    let [cache, _, p2p, requests] = story("lists", "p2p");
    assert_eq!((cache, p2p, requests), (100, 0, 1));
}

#[test]
fn device_memory_that_is_moved_is_known_where_it_is_and_nowhere_else() {
    let [_, _, p2p, _] = story("moves", "p2p");
    assert!(p2p > 0);
}

#[test]
fn a_position_that_others_share_is_where_bytes_have_been_moved_at_every_moment() {
    for mode in ["p2p", "auto"] {
        let [cache, ahead, p2p, _] = story("positions", mode);
        assert!(cache + ahead > 1 << 20 && p2p == 0, "{cache} {ahead} {p2p}");
    }
}

#[test]
fn a_process_that_is_killed_leaves_position_and_file_as_far_as_it_has_written() {
    story("killed", "p2p");
}

/// A library of the tests that has this name.
fn compiled(folder: &Path, source: &str, name: &str) -> PathBuf {
    let library = folder.join(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests")
        .join(source);
    let words = ["-shared", "-fPIC", "-O1", "-fno-builtin"];
    let made = Command::new("cc")
        .args(words)
        .arg(format!("-Wl,-soname,{name}"))
        .arg("-o")
        .arg(&library)
        .arg(source)
        .status()
        .unwrap();
    assert!(made.success());
    library
}

/// Runs a story with the CUDA driver of the tests; what it tells.
fn cuda_story(name: &str) -> String {
    cuda_story_of(name, 2 << 20)
}

/// The same with a file of that length.
fn cuda_story_of(name: &str, length: usize) -> String {
    let (folder, path, _) = file(length);
    let driver = compiled(folder.path(), "fake_cuda.c", "libcuda.so.1");
    let mut command = preloaded(built("examples/io_child"));
    command.args([name.as_ref(), path.as_os_str()]);
    let output = command.env("DRIVER", driver).output().unwrap();
    assert!(output.status.success(), "{}", told(&output));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn memory_of_a_cuda_driver_is_recognised_and_copied() {
    assert_eq!(cuda_story("cuda"), "1795288 0 0 11\n");
}

#[test]
fn memory_of_a_cuda_driver_is_what_is_mapped_and_not_what_is_reserved() {
    assert_eq!(cuda_story("cuda_mappings"), "105096 0 0 4\n");
}

#[test]
fn memory_of_a_cuda_driver_is_copied_while_the_file_is_read_or_written() {
    let round = (1 << 20) + 600_001 + (1 << 20) - 1;
    let (broken, until_pinned) = (2 * (6 << 18), 3 << 20);
    let moved = 4 * round + broken + until_pinned;
    assert_eq!(cuda_story("cuda_pinned"), format!("{moved} 0 0 23\n"));
}

#[test]
fn long_reads_to_memory_of_a_cuda_driver_are_shared_by_threads() {
    let moved = 2 * (16 << 20) + 13_000_000 + 7 + (8 << 20);
    assert_eq!(
        cuda_story_of("cuda_shared", 20 << 20),
        format!("{moved} 0 0 7\n")
    );
}

#[test]
fn cuda_drivers_may_refuse_unmap_and_forget() {
    let told = cuda_story_of("cuda_troubled", 4 << 20);
    assert!(told.ends_with(" 0 0 9233\n"), "{told}");
}

#[test]
fn memory_of_no_cuda_context_is_copied_in_every_thread() {
    assert_eq!(cuda_story("cuda_contexts"), "165000 0 0 6\n");
}

#[test]
fn programs_without_device_memory_do_what_they_do() {
    let (_folder, path, _) = file((3 << 20) + 5);
    let script = "sha256sum <\"$1\"; sort \"$1\" | cksum; \
                  dd if=\"$1\" bs=4097 status=none | tail -c 100 | od; \
                  grep -c a \"$1\"; exec 9<\"$1\"; exec 9<&-; \
                  cat \"$1\" | (read -r x; echo ${#x}); cat /nowhere";
    let run = |mut command: Command| {
        let output = command
            .args(["-c", script, "sh"])
            .arg(&path)
            .output()
            .unwrap();
        (output.status, output.stdout, output.stderr)
    };
    let plain = run(Command::new("bash"));
    assert!(!plain.1.is_empty() && !plain.2.is_empty());
    assert!(run(preloaded("bash")) == plain);
}

#[test]
fn totals_are_printed_and_decisions_traced() {
    let (folder, path, _) = file(2 << 20);
    let trace = folder.path().join("trace");
    let mut command = preloaded(built("examples/io_child"));
    command.args(["calls".as_ref(), path.as_os_str()]);
    command
        .env("FARLANE_IO_STATS", "1")
        .env("FARLANE_IO_TRACE", &trace);
    let output = command.env("FARLANE_IO", "p2p").output().unwrap();
    assert!(output.status.success(), "{}", told(&output));
    let said = String::from_utf8(output.stderr).unwrap();
    let text = std::fs::File::open(trace).unwrap();
    let decisions = farlane_io_core::plan::trace::read(std::io::BufReader::new(text));
    let decisions: Vec<_> = decisions.map(Result::unwrap).collect();
    use farlane_io_core::plan::trace::{Way, Why};
    let first = &decisions[0];
    assert_eq!(
        (first.call.as_str(), first.offset, first.length),
        ("pread", Some(4096), 100_000)
    );
    // The buffer begins at an odd address.
    assert_eq!((first.result, first.why), (100_000, Why::Misaligned));
    assert_eq!(first.file, path.to_str().unwrap());
    let bytes = |way| {
        decisions
            .iter()
            .map(|decision| decision.bytes(way))
            .sum::<u64>()
    };
    let line = format!(
        "{{\"cache\":{},\"read_ahead\":0,\"p2p\":{},\"requests\":{}}}\n",
        bytes(Way::Cache),
        bytes(Way::P2p),
        decisions.len()
    );
    assert_eq!(said, line);
    assert!(bytes(Way::P2p) > 50_000);
}
