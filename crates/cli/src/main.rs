//! The program `leasehold`: runs commands under locks in Redis, and shows and frees locks. It uses only the public
//! interface of the library.

// `println!` and `eprintln!` panic if they cannot write. The functions of `output` do not.
#![warn(clippy::print_stderr, clippy::print_stdout)]

mod acl;
mod args;
mod connection;
mod doctor;
mod election;
mod exit;
mod job;
mod locks;
mod output;
mod run;
mod time;
mod watch;

use std::env;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};

use crate::args::{Cli, Task};
use crate::exit::{Failure, USAGE};
use crate::output::Output;

fn main() -> ExitCode {
    if env::args_os()
        .nth(1)
        .is_some_and(|name| name == run::keeper::NAME)
    {
        return run::keeper::main();
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let is_help = !error.use_stderr();
            // This fails only if the reader has closed the pipe.
            let _ = error.print();
            return if is_help {
                ExitCode::SUCCESS
            } else {
                ExitCode::from(USAGE)
            };
        }
    };
    let connection = &cli.connection;
    let output = if cli.json { Output::Json } else { Output::Text };
    let outcome = match &cli.task {
        Task::Run(options) => run::run(connection, options, cli.verbose),
        Task::Elect(options) => run::elect(connection, options, cli.verbose),
        Task::Observe(options) => election::observe(connection, options, output),
        Task::Inspect(options) => locks::inspect(connection, options, output),
        Task::List(options) => locks::list(connection, options, output),
        Task::Watch(options) => watch::run(connection, options, output),
        Task::Unlock(options) => locks::unlock(connection, options, output),
        Task::Doctor => doctor::run(connection, output),
        Task::Acl(options) => acl::run(options, output),
        Task::Completions(options) => Ok(completions(options.shell)),
        Task::Man => manual(),
    };
    outcome.unwrap_or_else(Failure::report)
}

fn completions(shell: clap_complete::Shell) -> ExitCode {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "leasehold", &mut text);
    output::line(String::from_utf8_lossy(&text).trim_end());
    ExitCode::SUCCESS
}

/// Prints the manual page, with a section for each command.
fn manual() -> Result<ExitCode, Failure> {
    let mut command = Cli::command();
    command.build();
    let mut text = Vec::new();
    clap_mangen::Man::new(command.clone()).render(&mut text)?;
    for part in command
        .get_subcommands()
        .filter(|part| part.get_name() != "help")
    {
        let name = format!("leasehold {}", part.get_name());
        let part = part
            .clone()
            .display_name(name.clone())
            .bin_name(name.clone());
        let manual = clap_mangen::Man::new(part);
        text.extend(format!(".SH {}\n", name.to_uppercase()).into_bytes());
        manual.render_description_section(&mut text)?;
        manual.render_options_section(&mut text)?;
    }
    output::line(String::from_utf8_lossy(&text).trim_end());
    Ok(ExitCode::SUCCESS)
}
