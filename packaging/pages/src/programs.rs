//! The programs that packages install, and what their man pages say besides their options.

use clap::{Command, CommandFactory as _};

/// A program.
pub struct Program {
    /// Its command line.
    pub command: Command,
    /// Files that it reads or makes, and what each is.
    pub files: &'static [(&'static str, &'static str)],
    /// Other pages, as `NAME(SECTION)`.
    pub see_also: &'static [&'static str],
}

/// The program that a subcommand of another one is, by the same name with a dash: its name.
#[must_use]
pub fn of(subcommand: &Command) -> Option<String> {
    let name = subcommand.get_display_name()?;
    let is_one = all().iter().any(|one| one.command.get_name() == name);
    is_one.then(|| name.to_owned())
}

/// All programs.
#[must_use]
pub fn all() -> Vec<Program> {
    vec![
        Program {
            command: farlane_blk::options::Options::command(),
            files: &[
                (
                    "/etc/farlane/blk/VM.toml",
                    "Configuration of farlane-blk@VM.service.",
                ),
                (
                    "/run/farlane/blk/VM.sock",
                    "Its vhost-user socket, made by farlane-blk@VM.socket.",
                ),
                (
                    "/usr/share/qemu/vhost-user/50-farlane-blk.json",
                    "Describes it to management programs.",
                ),
            ],
            see_also: &["farlane-net(1)", "farlane-topology(1)"],
        },
        Program {
            command: farlane_net::options::Options::command(),
            files: &[
                (
                    "/etc/farlane/net/VM.toml",
                    "Configuration of farlane-net@VM.service.",
                ),
                (
                    "/run/farlane/net/VM.sock",
                    "Its vhost-user socket, made by farlane-net@VM.socket.",
                ),
                (
                    "/usr/share/qemu/vhost-user/50-farlane-net.json",
                    "Describes it to management programs.",
                ),
            ],
            see_also: &["farlane-blk(1)", "farlane-topology(1)", "ip-tuntap(8)"],
        },
        Program {
            command: farlane_rdma::options::Options::command(),
            files: &[
                (
                    "/etc/farlane/rdma/VM.toml",
                    "Configuration of farlane-rdma@VM.service.",
                ),
                (
                    "/run/farlane/rdma/VM.sock",
                    "Its vhost-user socket, made by farlane-rdma@VM.socket.",
                ),
            ],
            see_also: &["farlane-run(1)", "ibv_devinfo(1)"],
        },
        Program {
            command: farlane_lend::options::Options::command(),
            files: &[
                (
                    "/etc/farlane/lend.toml",
                    "Configuration of farlane-lend.service: which devices are lent, to whom.",
                ),
                (
                    "/run/farlane/lend.sock",
                    "Where borrowers of this host connect.",
                ),
            ],
            see_also: &["farlane-borrow(1)"],
        },
        Program {
            command: farlane_borrow::options::Options::command(),
            files: &[
                (
                    "/etc/farlane/borrow/VM.toml",
                    "Configuration of farlane-borrow@VM.service.",
                ),
                (
                    "/run/farlane/lend.sock",
                    "Where a lender of this host listens.",
                ),
            ],
            see_also: &["farlane-lend(1)"],
        },
        Program {
            command: farlane_tool::options::Options::command(),
            files: &[(
                "/run/farlane",
                "Where backends tell their metrics: sockets whose names end in .metrics.",
            )],
            see_also: &["farlane-lend(1)", "farlane-topology(1)"],
        },
        Program {
            command: farlane_topology::options::Options::command(),
            files: &[(
                "/sys/devices/system/node",
                "What the kernel says of the NUMA nodes.",
            )],
            see_also: &["farlane-blk(1)", "farlane-net(1)", "farlane-rdma(1)"],
        },
        Program {
            command: farlane_run::options::Options::command(),
            files: &[(
                "/usr/lib/x86_64-linux-gnu/farlane",
                "The libraries that programs are run on, where FARLANE_LIB_DIR names no other \
                 folder.",
            )],
            see_also: &["farlane-rdma(1)", "farlane-io(1)", "ld.so(8)"],
        },
        Program {
            command: farlane_io_tool::options::Options::command(),
            files: &[(
                "/usr/lib/x86_64-linux-gnu/farlane/libfarlane_io.so",
                "The library that decides as the stored cost model says.",
            )],
            see_also: &["farlane-run(1)"],
        },
    ]
}
