//! The counts that Redis itself keeps, at no cost to the measurement.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use leasehold_testbed::Server;

use crate::machine::{field, info, server_cpu};

/// The commands that call a script.
const SCRIPT_CALLS: [&str; 3] = ["eval", "evalsha", "fcall"];

/// The counts since the server started, or since an earlier reading.
#[derive(Clone, Debug, Default)]
pub struct ServerStats {
    /// The number of calls of each command, by its name in lower case (`client|tracking`), with the calls
    /// that scripts make.
    pub calls: BTreeMap<String, u64>,
    /// The number of reads from connections: requests that were written together take one read.
    pub reads: u64,
    /// Bytes that the server read from its clients.
    pub received: u64,
    /// Bytes that the server wrote to its clients.
    pub sent: u64,
    /// CPU time of the server.
    pub cpu: Duration,
    /// The time that scripts took. It includes the time in which the server waited for a core.
    pub in_scripts: Duration,
    /// Clients that are connected now.
    pub connections: u64,
}

impl ServerStats {
    /// Reads the counts since the server started.
    ///
    /// # Errors
    /// INFO lacks one of the counts.
    pub fn until_now(server: &Server) -> anyhow::Result<Self> {
        Self::read(&info(server, "all")?)
    }

    fn read(info: &str) -> anyhow::Result<Self> {
        let number = |name: &str| -> anyhow::Result<u64> {
            let count = field(info, name).with_context(|| format!("INFO has no {name}"))?;
            Ok(count.parse()?)
        };
        let calls = |line: &str| {
            let (name, count) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
            let calls = count.split(',').next()?.parse().ok()?;
            Some((name.to_owned(), calls))
        };
        let micros = |line: &str| {
            let (name, counts) = line.strip_prefix("cmdstat_")?.split_once(':')?;
            let (_, micros) = counts.split_once("usec=")?;
            let micros = micros.split(',').next()?.parse::<u64>().ok()?;
            SCRIPT_CALLS.contains(&name).then_some(micros)
        };
        Ok(Self {
            in_scripts: Duration::from_micros(info.lines().filter_map(micros).sum()),
            calls: info.lines().filter_map(calls).collect(),
            reads: number("total_reads_processed")?,
            received: number("total_net_input_bytes")?,
            sent: number("total_net_output_bytes")?,
            cpu: server_cpu(info)?,
            connections: number("connected_clients")?,
        })
    }

    /// The counts since the reading `before`.
    pub fn since(&self, before: &Self) -> Self {
        let calls = self.calls.iter().map(|(name, calls)| {
            let earlier = before.calls.get(name).copied().unwrap_or(0);
            (name.clone(), calls - earlier)
        });
        Self {
            calls: calls.collect(),
            reads: self.reads - before.reads,
            received: self.received - before.received,
            sent: self.sent - before.sent,
            cpu: self.cpu.saturating_sub(before.cpu),
            in_scripts: self.in_scripts.saturating_sub(before.in_scripts),
            connections: self.connections,
        }
    }

    /// Bytes in and out.
    pub fn bytes(&self) -> u64 {
        self.received + self.sent
    }

    /// Calls of scripts.
    pub fn scripts(&self) -> u64 {
        let calls = SCRIPT_CALLS.iter().filter_map(|name| self.calls.get(*name));
        calls.sum()
    }

    /// The number of requests that clients sent, without INFO. Redis also counts the commands that scripts call.
    /// `scripted` names commands that only scripts call, which are left out.
    pub fn requests(&self, scripted: &[&str]) -> u64 {
        let sent = self.calls.iter().filter(|(name, _)| {
            let name = name.as_str();
            name != "info" && !scripted.contains(&name)
        });
        sent.map(|(_, calls)| calls).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INFO: &str = "# Clients\r\nconnected_clients:3\r\n# Stats\r\ntotal_net_input_bytes:100\r\n\
        total_net_output_bytes:20\r\ntotal_reads_processed:7\r\n# CPU\r\nused_cpu_sys:1.5\r\n\
        used_cpu_user:0.25\r\n# Commandstats\r\ncmdstat_set:calls=4,usec=9\r\n\
        cmdstat_get:calls=4,usec=9\r\ncmdstat_evalsha:calls=3,usec=1\r\n\
        cmdstat_eval:calls=1,usec=1\r\ncmdstat_info:calls=2,usec=9\r\n";

    #[test]
    fn client_requests_are_counted_apart_from_script_calls() -> anyhow::Result<()> {
        let stats = ServerStats::read(INFO)?;
        assert_eq!(stats.requests(&["get"]), 8);
        assert_eq!(stats.scripts(), 4);
        assert_eq!((stats.received, stats.sent), (100, 20));
        assert_eq!(stats.reads, 7);
        assert_eq!(stats.cpu, Duration::from_millis(1750));
        assert_eq!(stats.in_scripts, Duration::from_micros(2));
        Ok(())
    }

    #[test]
    fn only_requests_after_the_start_are_counted() -> anyhow::Result<()> {
        let before = ServerStats::read(INFO)?;
        let later = INFO.replace("cmdstat_set:calls=4", "cmdstat_set:calls=9");
        let later = later + "cmdstat_del:calls=2,usec=1\r\n";
        let since = ServerStats::read(&later)?.since(&before);
        assert_eq!(since.requests(&[]), 7);
        assert_eq!((since.reads, since.bytes()), (0, 0));
        Ok(())
    }
}
