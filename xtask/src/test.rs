//! `cargo xtask test`: runs every check, in order, up to the first that fails. Shows cargo's output unchanged. With
//! `--servers`, runs the tests that need a server on other servers.

use std::env;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use comfy_table::Table;
use leasehold_tools::cargo::{cargo, run_to_end, run_within, workspace_root};
use leasehold_tools::options::Provision;
use leasehold_tools::stop::{Stop, Stopped};
use leasehold_tools::table::plain;

use crate::servers::{self, Choice, Release};

const SERVER_VARIABLE: &str = "LEASEHOLD_REDIS_SERVER";

#[derive(clap::Args)]
pub struct Options {
    /// Run only the integration tests and the unit tests of pipelines, on each of these servers, or on all of
    /// them. They are downloaded into the target folder, not installed
    #[arg(long, value_name = "SERVER,..", value_delimiter = ',')]
    servers: Vec<Choice>,
    /// The time limit for each step, in seconds. A test that hangs fails the step. On two cores, all steps together
    /// take half of the default
    #[arg(long, value_name = "SECONDS", default_value_t = 2_400)]
    step_limit: u64,
    #[command(flatten)]
    provision: Provision,
}

/// One call of cargo.
struct Check {
    name: &'static str,
    arguments: &'static [&'static str],
    /// Variables of cargo's environment.
    environment: &'static [(&'static str, &'static str)],
}

const fn check(name: &'static str, arguments: &'static [&'static str]) -> Check {
    Check {
        name,
        arguments,
        environment: &[],
    }
}

/// A call of cargo for all packages with all features. Tests that differ only in their targets share one build of the
/// packages and their dependencies. leasehold-peers is left out: it has locks of other crates, and no test.
macro_rules! all_features {
    ($command:literal $(, $argument:literal)* $(,)?) => {
        &[
            $command, "--locked", "--workspace", "--exclude", "leasehold-peers", "--all-features"
            $(, $argument)*
        ]
    };
}

/// Checks that need no server. Clippy's `--all-targets` also compiles examples and benches.
#[rustfmt::skip]
const STATIC_CHECKS: [Check; 3] = [
    check("format", &["fmt", "--all", "--check"]),
    check(
        "clippy",
        &[
            "clippy", "--locked", "--workspace", "--all-features", "--all-targets", "--", "-D", "warnings",
            // The parts that benches/micro measures.
            "--cfg", "leasehold_internals",
        ],
    ),
    check(
        "clippy, no features",
        &["clippy", "--locked", "--package", "leasehold", "--lib", "--tests", "--", "-D", "warnings"],
    ),
];

/// This check runs only where cargo-deny is installed. The first command downloads the dependencies of other platforms.
const DEPENDENCIES: Check = check(
    "dependencies",
    &[
        "deny",
        "--locked",
        "--workspace",
        "check",
        "licenses",
        "bans",
        "sources",
    ],
);

/// Reads the local copy of the advisory database.
const ADVISORIES: Check = check(
    "advisories",
    &[
        "deny",
        "--locked",
        "--workspace",
        "--offline",
        "check",
        "advisories",
    ],
);

/// The time limit for the download of the advisory database.
const FETCH_LIMIT: Duration = Duration::from_secs(60);

/// `--test` does not build the examples, but an integration test runs each of them.
const EXAMPLES: Check = check("examples", all_features!["build", "--examples"]);

const INTEGRATION_TESTS: &str = "integration tests";

/// The command for each other server that is present. It may lack TLS, so the feature is off.
const CONFORMANCE: &[&str] = &[
    "test",
    "--locked",
    "--test",
    "it",
    "conformance::redis",
    "--",
    "--test-threads=16",
];

/// The commands for each of the named servers, which may lack TLS. Which plain commands a lock uses, and which replicas
/// `WAIT` counts, depends on the server, and only unit tests see that.
const ON_EACH_SERVER: [Check; 2] = [
    check(
        "unit tests",
        &["test", "--locked", "--lib", "pipeline::tests"],
    ),
    check(
        INTEGRATION_TESTS,
        &[
            "test",
            "--locked",
            "--test",
            "it",
            "--",
            "--test-threads=16",
        ],
    ),
];

#[rustfmt::skip]
const CHECKS: [Check; 9] = [
    // Tests mostly wait for servers, time-outs and ttls, so the number of threads does not depend on the cores.
    check("unit tests", all_features!["test", "--lib", "--bins", "--", "--test-threads=8"]),
    EXAMPLES,
    check(INTEGRATION_TESTS, all_features!["test", "--test", "*", "--", "--test-threads=16"]),
    check("doc tests", all_features!["test", "--doc"]),
    // All packages are selected, so that their dependencies are built already.
    check("tests without features", &["test", "--locked", "--workspace", "--test", "without_features", "--test", "allocations"]),
    // Without features: the page of each type would have dead links in the docs of a trait of tracing.
    Check {
        name: "docs",
        arguments: &["doc", "--locked", "--workspace", "--no-deps"],
        environment: &[("RUSTDOCFLAGS", "-Dwarnings")],
    },
    check("links in the docs", &["run", "--locked", "--package", "xtask", "--", "doc-links"]),
    // The package as users get it, with the lowest and the highest redis that they may have.
    check("package", &["run", "--locked", "--package", "xtask", "--", "package"]),
    Check {
        name: "models",
        arguments: &[
            "test", "--locked", "--package", "leasehold", "--lib", "--target-dir", "target/models", "model",
        ],
        environment: &[
            // This variable replaces flags that are set elsewhere. RUSTFLAGS could itself be replaced.
            ("CARGO_ENCODED_RUSTFLAGS", "--cfg=shuttle"),
            // Everything is built anew for this step. Without debug information, that is a third less work.
            ("CARGO_PROFILE_DEV_DEBUG", "0"),
        ],
    },
];

/// The tools that cargo needs besides itself: the component, the command that comes with it, Debian's package.
const COMPONENTS: [(&str, &str, &str); 2] = [
    ("rustfmt", "fmt", "rustfmt"),
    ("clippy", "clippy", "rust-clippy"),
];

pub fn run(options: &Options, stop: &Stop) -> anyhow::Result<()> {
    let mut session = Session {
        server: None,
        stop,
        step_limit: Duration::from_secs(options.step_limit),
        times: Vec::new(),
    };
    if !options.servers.is_empty() {
        return session.check_on_each(&Choice::releases(&options.servers));
    }
    for (component, command, package) in COMPONENTS {
        session.provide_component(component, command, package, options)?;
    }
    for check in &STATIC_CHECKS {
        session.check(check)?;
    }
    session.check_dependencies()?;
    session.provide_server(options)?;
    for check in &CHECKS {
        session.check(check)?;
        if check.name == INTEGRATION_TESTS {
            session.check_conformance_on_others()?;
        }
    }
    println!("{}", session.summary());
    Ok(())
}

/// Whether cargo-deny has fetched its database before, whenever that was.
fn has_advisories() -> bool {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| env::home_dir().map(|home| home.join(".cargo")));
    let copies = home.and_then(|home| home.join("advisory-dbs").read_dir().ok());
    // Each copy is a folder beside a lock file.
    copies.is_some_and(|copies| {
        copies
            .flatten()
            .any(|copy| copy.path().join("crates").is_dir())
    })
}

/// A run of all the checks.
struct Session<'a> {
    server: Option<PathBuf>,
    stop: &'a Stop,
    step_limit: Duration,
    times: Vec<(String, Duration)>,
}

impl Session<'_> {
    fn check(&mut self, check: &Check) -> anyhow::Result<()> {
        self.check_as(check.name, check)
    }

    /// Runs `check` under another name.
    fn check_as(&mut self, name: &str, check: &Check) -> anyhow::Result<()> {
        let line = format!("cargo {}", check.arguments.join(" "));
        println!("\n==> {name}: {line}");
        let mut command = self.cargo()?;
        command.args(check.arguments);
        command.envs(check.environment.iter().copied());
        let start = Instant::now();
        let status = run_within(self.step_limit, &mut command, self.stop)?;
        let took = start.elapsed();
        let Some(status) = status else {
            bail!(
                "the step `{name}` did not end within {took:.1?}: {line} (a test that hangs \
                 \"has been running for over 60 seconds\" above, and has no result)"
            );
        };
        if !status.success() {
            bail!("the step `{name}` failed ({status}) after {took:.1?}: {line}");
        }
        println!("==> {name}: passed in {took:.1?}");
        self.times.push((name.to_owned(), took));
        Ok(())
    }

    /// Checks licences, sources and known vulnerabilities of the dependencies with cargo-deny.
    fn check_dependencies(&mut self) -> anyhow::Result<()> {
        if !self.answers("deny")? {
            println!(
                "\n==> {}: skipped, cargo-deny is not installed",
                DEPENDENCIES.name
            );
            return Ok(());
        }
        self.check(&DEPENDENCIES)?;
        let mut fetch = self.cargo()?;
        fetch.args(["deny", "fetch", "db"]);
        fetch.stdout(Stdio::null()).stderr(Stdio::null());
        let fetched = run_within(FETCH_LIMIT, &mut fetch, self.stop)?;
        if fetched.is_some_and(|status| status.success()) || has_advisories() {
            return self.check(&ADVISORIES);
        }
        println!(
            "\n==> {}: skipped, the advisory database cannot be reached and there is no copy of it here",
            ADVISORIES.name
        );
        Ok(())
    }

    /// Runs the tests that need a server on all `servers`, even if some fail.
    fn check_on_each(&mut self, servers: &[Release]) -> anyhow::Result<()> {
        let mut failures = Vec::new();
        let mut provided = Vec::new();
        for server in servers {
            match server.provide(self.stop) {
                Ok(program) => provided.push((server.name(), program)),
                Err(error) if error.is::<Stopped>() => return Err(error),
                Err(error) => failures.push(format!("{error:#}")),
            }
        }
        if !provided.is_empty() {
            self.check(&EXAMPLES)?;
        }
        for (name, program) in provided {
            self.server = Some(program);
            for check in &ON_EACH_SERVER {
                let name = format!("{name}, {}", check.name);
                if let Err(error) = self.check_as(&name, check) {
                    if error.is::<Stopped>() {
                        return Err(error);
                    }
                    println!("==> {name}: failed");
                    failures.push(error.to_string());
                }
            }
        }
        println!("{}", self.summary());
        ensure!(failures.is_empty(), "{}", failures.join("; "));
        Ok(())
    }

    /// Runs the conformance suite on each server of this machine that the other tests do not use. Downloads nothing.
    fn check_conformance_on_others(&mut self) -> anyhow::Result<()> {
        let Some(main) = self.server.clone() else {
            return Ok(());
        };
        for (program, version) in servers::others_present(&main)? {
            self.server = Some(program);
            self.check_as(
                &format!("conformance, {version}"),
                &check(INTEGRATION_TESTS, CONFORMANCE),
            )?;
        }
        self.server = Some(main);
        Ok(())
    }

    fn provide_server(&mut self, options: &Options) -> anyhow::Result<()> {
        const NAME: &str = "redis-server";
        self.stop.check()?;
        println!("\n==> {NAME}: looking for a server");
        let start = Instant::now();
        let server = options.provision.redis();
        let server = server.with_context(|| format!("the step `{NAME}` failed"))?;
        let took = start.elapsed();
        println!("==> {NAME}: {} in {took:.1?}", server.display());
        match options.provision.own_clock() {
            Some(_) => println!("==> faketime: servers have clocks of their own"),
            None => println!("==> faketime: missing, or does not work with this redis-server"),
        }
        self.server = Some(server);
        self.times.push((NAME.to_owned(), took));
        Ok(())
    }

    fn provide_component(
        &self,
        component: &str,
        command: &str,
        package: &str,
        options: &Options,
    ) -> anyhow::Result<()> {
        if self.answers(command)? {
            return Ok(());
        }
        let by_hand = format!(
            "run `rustup component add {component}`, or install the package of your system that contains \
            `cargo {command}` (Debian: {package}), then run this again"
        );
        if options.provision.no_install {
            bail!(
                "`cargo {command}` is missing, and --no-install forbids installing it: {by_hand}"
            );
        }
        println!("`cargo {command}` is missing: running `rustup component add {component}`");
        let mut rustup = Command::new("rustup");
        rustup
            .args(["component", "add", component])
            .current_dir(workspace_root()?);
        let installed = match run_to_end(&mut rustup, self.stop) {
            Err(error) if error.is::<Stopped>() => return Err(error),
            outcome => outcome.is_ok_and(|status| status.success()),
        };
        if !installed || !self.answers(command)? {
            bail!("`cargo {command}` is missing and could not be installed: {by_hand}");
        }
        Ok(())
    }

    fn answers(&self, command: &str) -> anyhow::Result<bool> {
        let answer = self
            .cargo()?
            .args([command, "--version"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        Ok(answer.is_ok_and(|status| status.success()))
    }

    fn cargo(&self) -> anyhow::Result<Command> {
        let mut command = cargo()?;
        if let Some(server) = &self.server {
            command.env(SERVER_VARIABLE, server);
        }
        Ok(command)
    }

    fn summary(&self) -> String {
        let mut table = Table::new();
        for (name, took) in &self.times {
            table.add_row([name.clone(), format!("passed in {took:.1?}")]);
        }
        let total: Duration = self.times.iter().map(|(_, took)| *took).sum();
        table.add_row(["all".to_owned(), format!("passed in {total:.1?}")]);
        plain(table, 1)
    }
}
