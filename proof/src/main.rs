//! Check the model of the protocol: `prove [--quick] [--break RULE] [--scenario NAME] [--list]`, or
//! print what can be observed of an add: `prove --traces [--quick] [--break RULE]`.
//!
//! Without `--break`, every scenario must hold, then every rule is broken in turn, in the first
//! scenario that needs it, and a counterexample must be found. See README.md.

mod automaton;
mod checker;
mod fence;
mod log;
mod rules;

use std::process::ExitCode;
use std::time::Instant;

use checker::{search, Found};
use rules::Rule;

const THREADS: usize = 2;
/// The scenario of the PostgreSQL fence; the others are of the log.
const FENCE: &str = "fence";

/// What the command line asks for.
#[derive(Default)]
struct Asked {
    quick: bool,
    traces: bool,
    broken: Option<Rule>,
    scenario: Option<String>,
}

fn main() -> ExitCode {
    let asked = match asked(std::env::args().skip(1)) {
        Ok(asked) => asked,
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::from(2);
        }
    };
    if asked.traces {
        traces(&asked);
        return ExitCode::SUCCESS;
    }
    let is_right = match asked.broken {
        Some(rule) => show(rule, &asked),
        None => hold(&asked) & catch(&asked),
    };
    ExitCode::from(u8::from(!is_right))
}

fn asked(mut arguments: impl Iterator<Item = String>) -> Result<Asked, String> {
    let mut asked = Asked::default();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--quick" => asked.quick = true,
            "--traces" => asked.traces = true,
            "--scenario" => {
                let name = arguments.next().unwrap_or_default();
                if !scenarios().any(|each| each == name) {
                    return Err(format!("no scenario {name:?}; --list shows them"));
                }
                asked.scenario = Some(name);
            }
            "--break" => {
                let name = arguments.next().unwrap_or_default();
                let rule = Rule::by_name(&name);
                asked.broken = Some(rule.ok_or(format!("no rule {name:?}; --list shows them"))?);
            }
            "--list" => {
                let names = rules::ALL.iter().map(|rule| rule.name());
                return Err(names.chain(scenarios()).collect::<Vec<_>>().join("\n"));
            }
            other => return Err(format!("{other:?} is none of --quick, --break, --scenario, --list, --traces")),
        }
    }
    Ok(asked)
}

fn scenarios() -> impl Iterator<Item = &'static str> {
    log::SCENARIOS.iter().map(|each| each.name).chain([FENCE])
}

/// Search a scenario, and return the names of the situations that it reached.
fn run(name: &str, broken: Option<Rule>) -> (Found, Vec<&'static str>) {
    if name == FENCE {
        let found = search(&fence::Fence { broken }, THREADS);
        let reached = reached(fence::SITUATIONS.iter().map(|each| each.0), found.situations);
        return (found, reached);
    }
    let scenario = log::SCENARIOS.iter().find(|each| each.name == name).expect("a scenario's name");
    let found = search(&log::Log::new(scenario, broken), THREADS);
    let reached = reached(log::SITUATIONS.iter().map(|each| each.0), found.situations);
    (found, reached)
}

fn reached(names: impl Iterator<Item = &'static str>, bits: u64) -> Vec<&'static str> {
    names.enumerate().filter(|(at, _)| bits >> at & 1 == 1).map(|(_, name)| name).collect()
}

/// Search every scenario with all rules kept. Returns whether no promise is broken and every
/// situation is reached.
fn hold(asked: &Asked) -> bool {
    println!("| scenario | states | longest path | seconds |\n|---|---|---|---|");
    let mut is_right = true;
    let mut all: Vec<&str> = Vec::new();
    let is_asked = |name: &&str| match &asked.scenario {
        Some(only) => only == name,
        None => !asked.quick || log::SCENARIOS.iter().all(|each| each.name != *name || each.quick),
    };
    for name in scenarios().filter(is_asked) {
        let began = Instant::now();
        let (found, reached) = run(name, None);
        let seconds = began.elapsed().as_secs_f32();
        println!("| {name} | {} | {} | {seconds:.1} |", thousands(found.states), found.depth);
        is_right &= !tell(&found);
        all.extend(reached);
    }
    let names = log::SITUATIONS.iter().map(|each| each.0).chain(fence::SITUATIONS.iter().map(|each| each.0));
    let missing: Vec<_> = names.filter(|name| !all.contains(name)).collect();
    if !missing.is_empty() && asked.scenario.is_none() && !asked.quick {
        println!("NEVER REACHED: {}", missing.join("; "));
        is_right = false;
    }
    is_right
}

/// Break each rule. Returns whether each has a counterexample, or a reason to have none.
fn catch(asked: &Asked) -> bool {
    if asked.scenario.is_some() {
        return true;
    }
    println!("\n| rule | if it is broken | steps | scenario |\n|---|---|---|---|");
    let mut is_right = true;
    for rule in rules::ALL {
        let scenario = rule.scenario();
        let is_quick = log::SCENARIOS.iter().all(|each| each.name != scenario || each.quick);
        if asked.quick && !is_quick {
            continue;
        }
        let (found, _) = run(scenario, Some(*rule));
        let steps = match (&found.counterexample, rule.harmless()) {
            (Some(_), None) => found.depth.to_string(),
            (None, Some(why)) => format!("none: {why}"),
            (Some(_), Some(_)) => "NOT HARMLESS".into(),
            (None, None) => "NOT CAUGHT".into(),
        };
        is_right &= !steps.starts_with("NOT");
        println!("| `{}` | {} | {steps} | {scenario} |", rule.name(), rule.broken());
    }
    is_right
}

/// Show the counterexample of a rule. Returns whether there is one.
fn show(rule: Rule, asked: &Asked) -> bool {
    let scenario = asked.scenario.as_deref().unwrap_or(rule.scenario());
    println!("{}: {}. Scenario: {scenario}", rule.name(), rule.broken());
    let (found, _) = run(scenario, Some(rule));
    println!("{} states", thousands(found.states));
    tell(&found)
}

/// Print the counterexample, if there is one.
fn tell(found: &Found) -> bool {
    if let Some(wrong) = &found.counterexample {
        println!("VIOLATED after {} steps: {}", wrong.steps.len(), wrong.promise);
        for ((who, what), state) in &wrong.steps {
            println!("  {who} {what}\n      {state}");
        }
    }
    found.counterexample.is_some()
}

fn thousands(number: usize) -> String {
    let digits = number.to_string();
    let parts: Vec<_> =
        digits.as_bytes().rchunks(3).rev().map(|part| std::str::from_utf8(part).unwrap()).collect();
    parts.join(",")
}

/// Print the automata of what can be observed of an add: a line for each state, with the letters that
/// may come next and the states that they lead to.
fn traces(asked: &Asked) {
    let scenarios = [&log::traces::SINGLE, &log::traces::ATOMIC];
    for scenario in scenarios.into_iter().filter(|each| each.quick || !asked.quick) {
        let log = log::Log::new(scenario, asked.broken);
        let first = log::traces::first(&log);
        let (made, initial) = automaton::Automaton::of(first, |each| log::traces::steps(&log, each));
        println!("{}:", scenario.name);
        for edges in made.reached(initial) {
            let name = |letter: automaton::Letter| log::traces::LETTERS[letter as usize].0;
            let edges: Vec<_> =
                edges.iter().map(|(letter, to)| format!("{} {to}", name(*letter))).collect();
            println!("{}", edges.join(" "));
        }
    }
}
