//! Programs that connect by the connection manager of the guests' kernel, which is a user of the
//! device itself: librdmacm as Debian has it, and the examples that come with that.

use anyhow::{Context as _, Result, ensure};
use farlane_kit::guest::{Guest, Job, Output};
use farlane_kit::report::Report;

use crate::conditions::wait_until;
use crate::tools::TOOL_TIMEOUT;

/// A program that is started twice, and what the client prints when it has done its work. `HERE` is
/// the server's address, and `PORT` a port.
pub struct Pair {
    pub serve: &'static str,
    pub ask: &'static str,
    /// The port that it listens on, where it cannot be told.
    pub port: Option<u16>,
    pub says: &'static str,
}

/// The port of all others.
const PORT: u16 = 18700;

/// What they have received they look at, where they can. Servers are told their address: of those
/// that listen at all the kernel does not say where.
pub const PAIRS: &[Pair] = &[
    Pair {
        serve: "rping -s -C 20 -v -V -S 100 -p PORT -a HERE",
        ask: "rping -c -C 20 -v -V -S 100 -p PORT -a HERE",
        port: None,
        says: "rdma-ping-19",
    },
    Pair {
        serve: "ucmatose -c 4 -C 20 -S 4096 -p PORT -b HERE",
        ask: "ucmatose -c 4 -C 20 -S 4096 -p PORT -s HERE",
        port: None,
        says: "return status 0",
    },
    Pair {
        serve: "udaddy -c 4 -C 20 -S 1024 -b HERE",
        ask: "udaddy -c 4 -C 20 -S 1024 -s HERE",
        port: Some(7174),
        says: "return status 0",
    },
    Pair {
        serve: "rdma_server -p PORT -s HERE",
        ask: "rdma_client -p PORT -s HERE",
        port: None,
        says: "rdma_client: end 0",
    },
    Pair {
        serve: "rstream -T v -S 65536 -C 20 -I 10 -p PORT -b HERE",
        ask: "rstream -T v -S 65536 -C 20 -I 10 -p PORT -s HERE",
        port: None,
        says: "64k",
    },
    Pair {
        serve: "ib_write_bw -R -F -s 65536 -n 100 -p PORT --bind_source_ip HERE",
        ask: "ib_write_bw -R -F -s 65536 -n 100 -p PORT HERE",
        port: None,
        says: "BW average",
    },
    Pair {
        serve: "ib_send_lat -R -F -e -s 64 -n 100 -p PORT --bind_source_ip HERE",
        ask: "ib_send_lat -R -F -e -s 64 -n 100 -p PORT HERE",
        port: None,
        says: "t_typical",
    },
];

/// One that goes on until it is stopped.
const ENDLESS: Pair = Pair {
    serve: "rping -s -C 10000000 -S 100 -p PORT -a HERE",
    ask: "rping -c -C 10000000 -S 100 -p PORT -a HERE",
    port: None,
    says: "",
};

/// How many of them a kernel of each kind runs.
pub const FEW: usize = 2;

/// How many of them find each other by the messages of connections and of datagrams alone, so that
/// our library runs them, too.
pub const OURS_TOO: usize = 4;

/// Programs of a guest can reach its connection manager.
pub fn start(guest: &Guest) -> Result<()> {
    guest.run("modprobe rdma_ucm")?;
    wait_until("programs can reach the connection manager", || {
        Ok(guest.exec("test -c /dev/infiniband/rdma_cm")?.success())
    })
}

/// Runs a server in one guest and a client in another one, or in the same.
pub fn run(server: &Guest, client: &Guest, brief: bool, report: &mut Report) -> Result<()> {
    for guest in [server, client] {
        start(guest)?;
    }
    for pair in &PAIRS[..if brief { FEW } else { PAIRS.len() }] {
        pair.run(server, client)?;
        report.tell("connection manager", pair.ask, "done".to_owned());
    }
    if !brief {
        multicast(server, client)?;
        report.tell("connection manager", "mckey", "done".to_owned());
    }
    Ok(())
}

/// Whether a program of a guest listens by the kernel's connection manager.
pub fn is_listening(guest: &Guest) -> Result<bool> {
    let look = "rdma resource show cm_id | grep -q LISTEN";
    Ok(guest.exec(look)?.success())
}

impl Pair {
    /// One of the lines, with the server's address.
    pub fn line(&self, line: &str, server: &str) -> String {
        let port = self.port.unwrap_or(PORT).to_string();
        line.replace("PORT", &port).replace("HERE", server)
    }

    /// Starts the server, and waits until it listens.
    pub fn serve<'g>(&self, server: &'g Guest) -> Result<Job<'g>> {
        self.serve_at((server, server.address()?))
    }

    /// The same at another address of the guest.
    fn serve_at<'g>(&self, (server, address): (&'g Guest, &str)) -> Result<Job<'g>> {
        let serving = server.spawn(&self.line(self.serve, address))?;
        let port = self.port.unwrap_or(PORT);
        let look = format!("rdma resource show cm_id | grep LISTEN | grep -q ':{port} '");
        wait_until("somebody listens", || {
            ensure!(
                !serving.has_ended(),
                "`{}` has ended: {}",
                self.serve,
                serving.so_far()
            );
            Ok(server.exec(&look)?.success())
        })?;
        Ok(serving)
    }

    fn run(&self, server: &Guest, client: &Guest) -> Result<()> {
        self.between((server, server.address()?), client)
    }

    /// Runs it with a server at this address of a guest.
    pub fn between(&self, (server, address): (&Guest, &str), client: &Guest) -> Result<()> {
        let serving = self.serve_at((server, address))?;
        let asked = client.spawn(&self.line(self.ask, address))?;
        let asked = asked.wait(TOOL_TIMEOUT);
        let asked = asked.with_context(|| format!("`{}`: {}", self.serve, serving.so_far()))?;
        self.check(&asked, &serving.so_far())?;
        let served = serving.wait(TOOL_TIMEOUT)?;
        served.check(format_args!("`{}`", self.serve))
    }

    /// The client has done its work.
    pub fn check(&self, asked: &Output, served: &str) -> Result<()> {
        ensure!(
            asked.success() && asked.all().contains(self.says),
            "`{}` failed: {}\n{}\nThe server said:\n{served}",
            self.ask,
            asked.how(),
            asked.all()
        );
        Ok(())
    }
}

/// Datagrams to a group, which both ends have joined by the connection manager. The receiver does
/// not say when it has: the sender sends until it has had enough.
fn multicast(receiver: &Guest, sender: &Guest) -> Result<()> {
    let line = |guest: &Guest| -> Result<String> {
        Ok(format!(
            "mckey -m 239.77.0.1 -C 20 -S 512 -b {}",
            guest.address()?
        ))
    };
    let receiving = receiver.spawn(&line(receiver)?)?;
    let send = format!("{} -s", line(sender)?);
    wait_until("the group's datagrams are received", || {
        let sent = sender.spawn(&send)?.wait(TOOL_TIMEOUT)?;
        sent.check(format_args!("`{send}`"))?;
        Ok(receiving.has_ended())
    })?;
    receiving.wait(TOOL_TIMEOUT)?.check(format_args!("`mckey`"))
}

/// A connection over which something is always under way.
pub struct Busy<'g> {
    ends: [Job<'g>; 2],
}

impl<'g> Busy<'g> {
    pub fn start(server: &'g Guest, client: &'g Guest) -> Result<Self> {
        let serving = ENDLESS.serve(server)?;
        let asking = client.spawn(&ENDLESS.line(ENDLESS.ask, server.address()?))?;
        wait_until("they are connected", || {
            let look = "rdma resource show cm_id | grep rping | grep -q CONNECT";
            Ok(server.exec(look)?.success())
        })?;
        Ok(Self {
            ends: [serving, asking],
        })
    }

    /// Both have been told that their device, or their peer, is gone. The client takes it for no
    /// error where it hears of that first by its connection, which it says.
    pub fn has_ended(self) -> Result<()> {
        for end in self.ends {
            let ended = end.wait(TOOL_TIMEOUT)?;
            let said = ended.all();
            ensure!(
                !ended.success() || said.contains("DISCONNECT EVENT"),
                "rping has ended as if nothing had been: {said}"
            );
        }
        Ok(())
    }
}
