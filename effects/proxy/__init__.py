"""A router: HTTP in front of other servers, of minfer's or vLLM's kind.

client --> RouterApplication --> ForwardingAttempt (forwarding) --> backend
                |    RequestReader (request_reader): keys of the prompt, tenant, session
                |    PromptReader (prompt_reader): large bodies go to worker processes
                v
           BackendDispatcher (backend_dispatcher): places requests, or has them wait
                ^
           HealthWatch (health): backends that join, drain and leave
           KvSubscriber (kv_subscriber): what vLLM's servers report of their caches
"""
