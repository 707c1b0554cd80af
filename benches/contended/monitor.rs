//! Counts the requests that clients send, with Redis' MONITOR: only MONITOR distinguishes requests from commands inside
//! scripts. MONITOR slows the server down, so requests are counted in a round of their own. The counts that Redis keeps
//! at no cost (`leasehold_load::ServerStats`) are less exact.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpStream};

use leasehold_testbed::Server;

/// The command that ends the count, sent over another connection.
const END: &str = "counted-until-here";

/// The number of requests, by command.
pub type Requests = BTreeMap<String, u64>;

/// A count from `start` to `end`. The lines of MONITOR stay in Redis until the end: reading them at once would cost the
/// server a write, and the machine a wake-up, for every few commands.
pub struct Monitor(BufReader<TcpStream>);

impl Monitor {
    pub fn start(server: &Server) -> io::Result<Self> {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, server.port()))?;
        let mut lines = BufReader::with_capacity(1 << 16, stream);
        lines.get_mut().write_all(b"MONITOR\r\n")?;
        let mut answer = String::new();
        lines.read_line(&mut answer)?;
        if answer.trim_end() != "+OK" {
            return Err(io::Error::other(format!("MONITOR replied {answer:?}")));
        }
        Ok(Self(lines))
    }

    pub fn end(mut self, server: &Server) -> Result<Requests, Box<dyn Error>> {
        server.command(&["ECHO", END])?;
        let mut requests = Requests::new();
        let mut line = Vec::new();
        loop {
            line.clear();
            if self.0.read_until(b'\n', &mut line)? == 0 {
                return Err("MONITOR was cut off".into());
            }
            let Some((name, arguments)) = sent(&String::from_utf8_lossy(&line)) else {
                continue;
            };
            if name == "echo" && arguments.contains(END) {
                return Ok(requests);
            }
            *requests.entry(name).or_default() += 1;
        }
    }
}

/// The command, if a client sent it, and the rest of the line.
///
/// A line is `+time [database address] "command" "argument" ..`; a script's address is `lua`.
fn sent(line: &str) -> Option<(String, String)> {
    let (from, command) = line.split_once("] \"")?;
    let (name, arguments) = command.split_once('"')?;
    let by_client = !from.ends_with(" lua");
    by_client.then(|| (name.to_ascii_lowercase(), arguments.to_owned()))
}
