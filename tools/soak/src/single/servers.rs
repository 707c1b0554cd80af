//! The primary and its replica, which change places as in a planned switch-over: no connection is closed, and
//! nothing is lost.

use std::mem;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use leasehold_testbed::{Proxy, Server, eventually};

/// The limit for the replica to have all data of the primary, and to have it on disk if necessary.
const IN_STEP: Duration = Duration::from_secs(20);
/// For how long writes are paused, in ms: longer than a switch-over takes.
const PAUSE: &str = "10000";

pub struct Servers {
    pub primary: Server,
    pub replica: Server,
}

impl Servers {
    /// `remembers`: whether a killed server has its data when it is restarted.
    pub fn start(remembers: bool) -> anyhow::Result<Self> {
        let start = || {
            let mut server = Server::builder()
                .arg("repl-diskless-sync-delay", "0")
                // Otherwise a restart could bring back old data from the server's time as a replica.
                .arg("rdb-del-sync-files", "yes");
            if remembers {
                // Acknowledged writes are in the file, and stay there when the process is killed. (They might not if
                // the machine failed.)
                server = server
                    .arg("appendonly", "yes")
                    .arg("appendfsync", "no")
                    .arg("auto-aof-rewrite-percentage", "0");
            }
            server.start().context("cannot start a private server")
        };
        let servers = Self {
            primary: start()?,
            replica: start()?,
        };
        replicate(&servers.replica, &servers.primary)?;
        Ok(servers)
    }

    /// Makes the replica the primary. New connections through `addresses` go to it, and existing connections stay.
    /// Writes are paused until the replica has all of them, so every promise holds, and nothing is excused.
    pub fn switch_over<'a>(
        &mut self,
        addresses: impl Iterator<Item = &'a Proxy>,
    ) -> anyhow::Result<()> {
        let Self { primary, replica } = self;
        let port = primary.port();
        let follows = || {
            let state = info(replica, "replication")?;
            let file = info(replica, "persistence")?;
            // The full copy that the replica received must be in its file, too.
            let is_written = file.contains("aof_rewrite_in_progress:0")
                && file.contains("aof_rewrite_scheduled:0");
            anyhow::Ok(
                state.contains(&format!("master_port:{port}\r\n"))
                    && state.contains("master_link_status:up")
                    && is_written,
            )
        };
        let is_ready = eventually(IN_STEP, || follows().unwrap_or(false));
        ensure!(
            is_ready,
            "the replica does not follow: {}",
            info(replica, "replication")?
        );
        primary.command(&["CLIENT", "PAUSE", PAUSE, "WRITE"])?;
        let caught_up = || {
            let (sent, has) = (info(primary, "replication")?, info(replica, "replication")?);
            let sent = field(&sent, "master_repl_offset:")?;
            anyhow::Ok(sent == field(&has, "slave_repl_offset:")?)
        };
        let is_in_step = eventually(IN_STEP / 4, || caught_up().unwrap_or(false));
        if is_in_step {
            replica.command(&["REPLICAOF", "NO", "ONE"])?;
            addresses.for_each(|address| address.redirect(replica.port()));
            replicate(primary, replica)?;
        }
        primary.command(&["CLIENT", "UNPAUSE"])?;
        ensure!(is_in_step, "the replica does not catch up");
        mem::swap(primary, replica);
        Ok(())
    }
}

fn replicate(one: &Server, other: &Server) -> anyhow::Result<()> {
    one.command(&["REPLICAOF", "127.0.0.1", &other.port().to_string()])?;
    Ok(())
}

fn info(server: &Server, section: &str) -> anyhow::Result<String> {
    let info = server.command(&["INFO", section])?;
    Ok(info.as_text().context("INFO is text")?.to_owned())
}

fn field(info: &str, name: &str) -> anyhow::Result<u64> {
    let value = info.lines().find_map(|line| line.strip_prefix(name));
    let value = value.with_context(|| format!("no {name} in INFO"))?;
    Ok(value.trim().parse()?)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpStream;

    use super::*;

    /// The role that a server reports on a connection.
    fn role(mut connection: &TcpStream) -> String {
        connection.write_all(b"ROLE\r\n").unwrap();
        let mut bytes = [0; 1024];
        let count = connection.read(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..count]).into_owned()
    }

    fn connect(address: &Proxy) -> TcpStream {
        TcpStream::connect(("127.0.0.1", address.port())).unwrap()
    }

    #[test]
    fn a_switch_over_keeps_data_and_connections() {
        for remembers in [false, true] {
            let mut servers = Servers::start(remembers).unwrap();
            let address = Proxy::start(servers.primary.port()).unwrap();
            let before = connect(&address);
            assert!(role(&before).contains("master"));
            for round in 0..3 {
                let value = format!("value {round}");
                servers.primary.command(&["SET", "k", &value]).unwrap();
                servers.switch_over([&address].into_iter()).unwrap();
                let found = servers.primary.command(&["GET", "k"]).unwrap();
                assert_eq!(found.as_text(), Some(&*value));
                assert!(role(&connect(&address)).contains("master"));
                if round == 0 {
                    assert!(role(&before).contains("slave"));
                }
            }
            // The server has the data that it received as a replica in its file.
            servers.primary.kill();
            servers.primary.restart().unwrap();
            let exists = || servers.primary.command(&["EXISTS", "k"]).unwrap().as_int();
            // While the server loads its file, it replies with an error.
            assert!(eventually(IN_STEP, || exists().is_some()));
            assert_eq!(exists(), Some(i64::from(remembers)));
        }
    }
}
